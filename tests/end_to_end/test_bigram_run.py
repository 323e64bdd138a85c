"""A whole run in one process, in seconds: real controller, actor, engine over HTTP, gloo broadcast, training loop.

The bigram model must learn to answer "b" from a uniform start; only the streams are in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from inference_contract.schemas import OnUpdate
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.controller.controller import Controller
from pipelinerl.controller.inputs import EngineOffered
from pipelinerl.controller.knobs import Knobs
from pipelinerl.controller.service import ControllerService
from pipelinerl.controller.settings import ControllerSettings
from pipelinerl.controller.state import RunState
from pipelinerl.engines import bigram_engine
from pipelinerl.engines.engine_pool import EnginePool
from pipelinerl.engines.http_client import EngineClient
from pipelinerl.engines.http_server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.bigram import BigramModel
from pipelinerl.models.tiny_decoder import char_tokenizer
from pipelinerl.objective.presets import resolve
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.stream import Stream
from pipelinerl.trainers.bigram_trainer import BigramTrainer
from pipelinerl.training.admission import NoSignal
from pipelinerl.training.checkpoint import CheckpointStore, TrainingState
from pipelinerl.training.loop import LoopSettings, TrainingLoop
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.types import Message, Outcome, Problem, Sampling, Verdict
from pipelinerl.weights.broadcast import BroadcastPublisher
from pipelinerl.weights.layout import wire_layout
from tests.fakes.served import in_thread
from trainer_contract.types import OptimizerSpec, TrainerSpec

STEPS = 30


class SaysB:
    """A verifier of one right answer."""

    async def verify(self, problem: Problem, text: str) -> Verdict:
        correct = text.strip() == problem.ground_truth
        return Verdict(outcome=Outcome.CORRECT if correct else Outcome.WRONG, reward=float(correct))


def problem(index: int) -> Problem:
    return Problem(problem_id=str(index), domain="b", messages=(Message("user", "say b"),), ground_truth="b")


def new_controller(*, steps: int = STEPS, k: float = 4) -> Controller:
    settings = ControllerSettings(
        seed=0,
        steps=steps,
        until_accuracy=None,
        max_groups=256,
        sampling=Sampling(num_samples=8, max_tokens=2),
        evaluation_problems=4,
        evaluation_max_tokens=2,
        checkpoint_interval_steps=10,
        engines_expected=1,
    )
    knobs = Knobs(
        j=1,
        k=k,
        temperature=1.0,
        learning_rate=0.3,
        rollouts_per_step=64,
        evaluation_interval_steps=10,
        group_size=8,
    )
    return Controller(settings, RunState(knobs=knobs), training_problem=problem, held_out_problem=problem)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    tokenizer = char_tokenizer(alphabet="abcdefghijklmnopqrstuvwxyz ")
    BigramModel.random(len(tokenizer), seed=0, scale=0.0).save(path)
    tokenizer.save_pretrained(str(path), save_jinja_files=False)
    return path


async def run(
    directory: Path,
    model: Path,
    url: str,
    *,
    controller: Controller,
    stream: Stream,
    restored: tuple[Path, TrainingState] | None = None,
    until: Callable[[Controller], bool] = lambda controller: False,
) -> list[dict[str, object]]:
    """Run to the end (or until `until`), and return the events."""
    trainer = BigramTrainer()
    trainer.init_worker(
        TrainerSpec(
            model_path=model,
            optimizer=OptimizerSpec(grad_clip=0.0),
            restore_from=restored[0] / "trainer" if restored else None,
        )
    )
    client = EngineClient()
    pool = EnginePool(client)
    events = EventLog(directory / "events.jsonl")
    service = ControllerService(controller, name="bigram", stream=stream, probe=client, events=events, poll_s=0.2)
    actor = Actor(
        ActorSettings(name="actor-0", groups_in_flight=16, attempts=3, block_s=0.05),
        stream=stream,
        sampler=pool,
        verifier_of=lambda domain: SaysB(),
    )
    loop = TrainingLoop(
        LoopSettings(
            micro_batch_tokens=512,
            tokens_per_step=None,
            no_signal=NoSignal.TRAIN,
            deadline_s=10.0,
            on_update=OnUpdate.CONTINUE,
            schedule=LearningRateSchedule(warmup_steps=0, steps=STEPS, shape="constant", final_fraction=0.0),
        ),
        trainer=trainer,
        layout=wire_layout(trainer.weight_layout()),
        objective=resolve("pipelinerl"),
        stream=stream,
        publisher=BroadcastPublisher(client),
        checkpoints=CheckpointStore(directory / "checkpoints", keep=2, model_directory=model),
        restored=restored[1] if restored else None,
    )
    serving = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    pool.update([url])
    await service.perform(EngineOffered(now=0.0, url=url))
    tasks = [serving, asyncio.create_task(actor.run()), asyncio.create_task(loop.run())]
    finished = asyncio.create_task(service.finished.wait())
    try:
        async with asyncio.timeout(60):
            while not finished.done() and not until(controller):
                done, _ = await asyncio.wait([*tasks[:2], finished], timeout=0.05, return_when="FIRST_COMPLETED")
                for task in done - {finished}:
                    task.result()
                if tasks[2].done():
                    tasks[2].result()
    except Exception as error:
        error.add_note(service.status().to_json().decode())
        raise
    finally:
        for task in [*tasks, finished]:
            task.cancel()
        await asyncio.gather(*tasks, finished, return_exceptions=True)
        await loop.close()
        await client.close()
        events.close()
    return read_events(directory / "events.jsonl")


async def test_a_bigram_learns_in_flight(tmp_path: Path, model: Path) -> None:
    engine = bigram_engine.from_options(
        EngineOptions(model_path=model, model_id="bigram", slots=64, max_waiting=4096, context_length=64)
    )
    controller = new_controller()
    with in_thread(create_app(engine, token=None)) as url:
        events = await run(tmp_path, model, url, controller=controller, stream=MemoryStream())
    steps = [event for event in events if event["kind"] == "step"]
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert evaluations[0]["accuracy"] == 0.0 and evaluations[-1]["accuracy"] == 1.0
    assert steps[-1]["reward"] > 0.8  # type: ignore[operator]
    assert max(step["staleness_max"] for step in steps) <= 4  # type: ignore[type-var]
    assert [event["model_version"] for event in events if event["kind"] == "checkpoint"] == [10, 20, 30]
    ledger = controller.state.account.ledger()
    assert ledger["issued"] == sum(count for fate, count in ledger.items() if fate != "issued")
    assert events[-1]["kind"] == "run_finished"


async def test_a_run_that_was_cut_off_goes_on_from_its_checkpoint(tmp_path: Path, model: Path) -> None:
    """Everything dies in the middle; with new streams, engine and processes the run trains each prompt once."""
    options = EngineOptions(model_path=model, model_id="bigram", slots=64, max_waiting=4096, context_length=64)
    with in_thread(create_app(bigram_engine.from_options(options), token=None)) as url:
        await run(
            tmp_path,
            model,
            url,
            controller=new_controller(),
            stream=MemoryStream(),
            until=lambda controller: controller.state.version >= 14,
        )
    latest = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model).latest()
    assert latest is not None
    cut_off = latest[1].model_version
    assert cut_off in (10, 20), "on a busy machine it gets further before it is seen"
    resumed = new_controller()
    resumed.state.resume(latest[1].controller)
    with in_thread(create_app(bigram_engine.from_options(options), token=None)) as url:
        events = await run(tmp_path, model, url, controller=resumed, stream=MemoryStream(), restored=latest)
    after = [event["step"] for event in events if event["kind"] == "step"]
    assert after[cut_off - STEPS :] == list(range(cut_off + 1, STEPS + 1))
    assert resumed.epoch == 2
    ledger = resumed.account.ledger()
    assert ledger["trained"] == STEPS * 8
    assert ledger["issued"] == sum(count for fate, count in ledger.items() if fate != "issued")
