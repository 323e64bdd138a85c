"""A whole run in one process, in seconds: real controller, actor, engine over HTTP, gloo broadcast, training loop.

The bigram model must learn to answer "b" from a uniform start; only the streams are in memory.
"""

import asyncio
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import pytest

from inference_contract.schemas import ChatMessage
from inference_contract.weights import OnUpdate
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.recipe import parse
from pipelinerl.config.sections import RunSection
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.controller.state.inputs_and_effects import EngineRegistered
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.reward_history import WINDOW, RewardHistory
from pipelinerl.controller.state.run_state import ControllerSettings, RunState
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.enums import NoSignal, OnCollapse
from pipelinerl.errors import Rewound
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.plugins.bigram import engine as bigram_engine
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.roles.wiring import objective_of
from pipelinerl.roles.workers import close_workers, started
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.training.canary_check import TOLERANCES, Canary, check_canary
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.loop import LoopSettings, training_loop
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.types import Message, Outcome, Problem, Sampling, Verdict
from pipelinerl.verifiers.verifier import PerAnswerVerifier
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.grace import Grace
from tests.fakes.served import in_thread
from tests.patience import PATIENCE_S

STEPS = 30
RATE = 0.3
SAY = (ChatMessage(role="user", content="say b"),)
CANARY = Canary(messages=SAY, tolerance=TOLERANCES["float32"], context_length=64)


class SaysB:
    """A verifier for which only the answer "b" is right."""

    async def verify(self, problem, text):
        correct = text.strip() == problem.ground_truth
        return Verdict(outcome=Outcome.CORRECT if correct else Outcome.WRONG, reward=float(correct))


def problem(index):
    return Problem(problem_id=str(index), domain="b", messages=(Message("user", "say b"),), ground_truth="b")


def new_controller(*, steps=STEPS, k=4):
    settings = ControllerSettings(
        run=RunSection(steps=steps),
        max_groups=256,
        sampling=Sampling(num_samples=8, max_tokens=2),
        evaluation=EvaluationPlan(sets=(EvaluationSet(problems=4, max_tokens=2),)),
        checkpoint_interval_steps=10,
        engines_expected=1,
    )
    knobs = Knobs(
        j=1, k=k, temperature=1.0, learning_rate=RATE, rollouts_per_step=64, evaluation_interval_steps=10,
        groups_in_flight=16, domain_weights={"b": 1.0}, group_sizes={"b": 8},
    )  # fmt: skip
    state = RunState(knobs=knobs, first_domain_weights=knobs.domain_weights)
    problems = {
        "training_problem": lambda index, *_: problem(index),
        "held_out_problem": lambda _, index: problem(index),
    }
    return Controller(settings, state, **problems)


@pytest.fixture
def model(tmp_path):
    return model_in(tmp_path / "model")


def model_in(path, *, alphabet="abcdefghijklmnopqrstuvwxyz "):
    tokenizer = char_tokenizer(alphabet=alphabet)
    BigramModel.random(len(tokenizer), seed=0, scale=0.0).save(path)
    tokenizer.save_pretrained(str(path), save_jinja_files=False)
    return path


async def run(
    directory,
    model,
    url,
    *,
    controller,
    stream,
    restored=None,
    learning=MappingProxyType({"objective": "pipelinerl"}),
    until=lambda controller: False,
    meanwhile=None,
):
    """Run to the end, or until `until` returns true; return the events.

    Args:
        learning: settings added to the recipe.
        meanwhile: coroutine function that runs concurrently; it may end before the run only by raising an error.
    """
    recipe = {"model": {"path": str(model)}, "trainer": {"type": "bigram"}}
    recipe |= {"optimizer": {"grad_clip": 0.0, "learning_rate": RATE}, "domains": [{"name": "b", "source": "addition"}]}
    config = parse(recipe | learning)
    objective = objective_of(config)
    step = started(config, objective, checkpoint=restored[0] if restored else None)
    client = EngineClient()
    pool = EnginePool(client)
    events = EventLog(directory / "events.jsonl")
    service = ControllerService(controller, name="bigram", stream=stream, probe=client, events=events, poll_s=0.2)
    actor = Actor(
        ActorSettings(name="actor-0", groups_in_flight=16, block_s=0.05),
        stream=stream,
        maker_of=lambda _: SingleTurn(pool, lambda domain: PerAnswerVerifier(SaysB()), attempts=3),
    )
    loop = training_loop(
        LoopSettings(
            no_signal=NoSignal.TRAIN,
            deadline_s=PATIENCE_S,
            on_update=OnUpdate.CONTINUE,
            schedule=LearningRateSchedule(warmup_steps=0, steps=STEPS, shape="constant", final_fraction=0.0),
            kl=config.kl_control.controller if config.kl_control else None,
        ),
        step=step,
        objective=objective,
        stream=stream,
        publisher=BroadcastPublisher(client),
        check_canary=partial(check_canary, CANARY, client, Grace()),
        checkpoints=CheckpointStore(directory / "checkpoints", keep=2, model_directory=model),
        restored=restored[1] if restored else None,
    )
    serving = asyncio.create_task(service.run())
    await asyncio.sleep(0)
    pool.update([url])
    await service.perform(EngineRegistered(now=0.0, url=url))
    tasks = [serving, asyncio.create_task(actor.run()), asyncio.create_task(loop.run())]
    if meanwhile is not None:
        tasks.append(asyncio.ensure_future(meanwhile(service, pool)))
    finished = asyncio.create_task(service.finished.wait())
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not finished.done() and not until(controller):
                done, _ = await asyncio.wait([*tasks[:2], finished], timeout=0.05, return_when="FIRST_COMPLETED")
                for task in done - {finished}:
                    task.result()
                for task in tasks[2:]:
                    if task.done():
                        task.result()
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
        close_workers(step)
    return read_events(directory / "events.jsonl")


def served(model):
    """Serve an engine of the model; the value of the `with` block is its URL."""
    options = EngineOptions(model_path=model, model_id="bigram", slots=64, max_waiting=4096, context_length=64)
    return in_thread(create_app(bigram_engine.from_options(options), token=None))


async def test_bigram_model_learns_while_weights_are_updated_during_sampling(tmp_path, model):
    controller = new_controller()
    with served(model) as url:
        events = await run(tmp_path, model, url, controller=controller, stream=MemoryStream())
    steps = [event for event in events if event["kind"] == "step"]
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert evaluations[0]["accuracy"] == 0.0 and evaluations[-1]["accuracy"] == 1.0
    assert steps[-1]["reward"] > 0.8
    assert max(step["staleness_max"] for step in steps) <= 4
    assert [event["model_version"] for event in events if event["kind"] == "checkpoint"] == [10, 20, 30]
    ledger = controller.state.account.ledger()
    assert ledger["issued"] == sum(count for category, count in ledger.items() if category != "issued")
    assert events[-1]["kind"] == "run_finished"


async def test_ppo_run_with_critic_warm_up_and_kl_control_learns(tmp_path, model):
    """During the critic's warm-up, version numbers rise although the policy's weights do not change."""
    terms = {"adv": {"whitening": "none"}, "grad1": {"over": "old"}, "grad2": {"kind": "kl", "beta": 0.01}}
    learning = {
        "objective": {"preset": "ppo", **terms},
        "critic": {"learning_rate": 0.1, "warmup_steps": 3},
        "kl_control": {"target": 0.3, "gain": 0.5},
    }
    controller = new_controller()
    with served(model) as url:
        events = await run(tmp_path, model, url, controller=controller, stream=MemoryStream(), learning=learning)
    steps = [event for event in events if event["kind"] == "step"]
    evaluations = [event for event in events if event["kind"] == "evaluation"]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert evaluations[0]["accuracy"] == 0.0 and evaluations[-1]["accuracy"] == 1.0
    assert [step["learning_rate"] for step in steps[:4]] == [0.0, 0.0, 0.0, RATE]
    assert [step["grad_norm"] for step in steps[:3]] == [0.0] * 3 and steps[3]["grad_norm"] > 0
    assert all(step["kl_reference"] == pytest.approx(0.0, abs=1e-6) for step in steps[:4]), "nothing has moved"
    assert steps[-1]["kl_reference"] > 0.5, "the reference is the model that the run began with"
    coefficients = [step["kl_coefficient"] for step in steps]
    assert coefficients[:2] == [0.01, pytest.approx(0.009)], "near the reference the penalty falls"
    assert coefficients[-1] > min(coefficients), "and far from it the penalty rises"
    assert steps[0]["value_mean"] == 0.0 and steps[-1]["value_mean"] > 0.1, "values follow the rewards"
    latest = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model).latest()
    assert latest is not None and (latest[0] / "critic").is_dir()
    assert latest[1].kl_coefficient is not None and latest[1].kl_coefficient > coefficients[-1]
    ledger = controller.state.account.ledger()
    assert ledger["trained"] == STEPS * 8


async def test_old_logprobs_from_the_sampling_weights_equal_the_engines_logprobs(tmp_path, model):
    """A bigram model has no KV cache to go stale, so log-probs differ only by rounding, also across weight updates."""
    learning = {"objective": "decoupled_ppo", "training": {"old_logprobs": "sampling_weights"}, "staleness": {"k": 8}}
    with served(model) as url:
        events = await run(tmp_path, model, url, controller=new_controller(), stream=MemoryStream(), learning=learning)
    steps = [event for event in events if event["kind"] == "step"]
    largest = [value for step in steps for name, value in step.items() if name.startswith("old_mis") and "_max" in name]
    assert max(largest) <= 1e-5
    aged = [step["mismatch_staleness_max"] for step in steps if "mismatch_staleness_max" in step]
    assert max(aged) > 1e-2, "old weights sampled, and were others"
    assert {step["history_versions"] for step in steps} == {1.0, 2.0, 3.0, 4.0}
    kept = sorted((tmp_path / "checkpoints" / f"step-{STEPS:06d}" / "history").iterdir())
    assert [file.stem for file in kept] == [f"version-{version:06d}" for version in range(STEPS - 3, STEPS + 1)]


async def test_collapsed_run_continues_from_a_good_checkpoint_and_trains_each_prompt_once(tmp_path, model):
    """The rewards are those of a good run, but the controller remembers better ones up to version 12.

    It returns to the version of its best evaluation, 10 or 20, which the trainer has passed.
    """
    controller = new_controller()
    run_section = controller.settings.run.model_copy(update={"on_collapse": OnCollapse.REWIND})
    controller.settings = replace(controller.settings, run=run_section)

    async def collapse(service, pool):
        while controller.state.version < 22:
            await asyncio.sleep(0.01)
        fallen = {"recent": [(29.0, -9.0)] * WINDOW, "differences": [0.01] * 50}
        controller.state.watched.rewards = RewardHistory(first=0.5, best=0.9, best_version=12, held=WINDOW, **fallen)
        await asyncio.Event().wait()

    stream = MemoryStream()
    with served(model) as url:
        with pytest.raises(Rewound, match=r"to version (10|20)"):
            await run(tmp_path, model, url, controller=controller, stream=stream, meanwhile=collapse)
        restored = CheckpointStore(tmp_path / "checkpoints", keep=2, model_directory=model).latest()
        assert restored is not None and restored[1].model_version in (10, 20)
        assert controller.state.rewind.to is not None and controller.state.rewind.to >= 12
        assert controller.state.knobs.learning_rate == RATE / 2
        resumed = new_controller()
        resumed.state.resume(restored[1].controller, step=restored[1].model_version)
        events = await run(tmp_path, model, url, controller=resumed, stream=stream, restored=restored)
    history = tell(events)
    assert [step["step"] for step in history.steps] == list(range(1, STEPS + 1))
    orders = [order for step in history.steps for order in step["orders"]]
    ledger = resumed.state.account.ledger()
    assert len(set(orders)) == len(orders) == ledger["trained"] == STEPS * 8
    assert ledger["issued"] == sum(count for category, count in ledger.items() if category != "issued")
