"""A whole run in one process with simulated devices: a bigram engine and trainer that wait as long as a GPU would.

    python -m benchmarks.paced FOLDER section.key=value …

All other parts are those of a real run, except that streams are in memory and the verifier alternates between two
verdicts. The time therefore depends on the schedule and on those other parts, hardly on this machine's load. FOLDER
receives the recipe, the events and the lengths of answers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, final

import uvicorn

from inference_contract.engine import Engine
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.config.recipe import RunConfig, load, save
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.inputs_and_effects import EngineRegistered
from pipelinerl.engines.batching.batching_engine import BatchingEngine
from pipelinerl.engines.bigram.engine import BigramRunner
from pipelinerl.engines.external.worker.worker_endpoint import endpoints_of
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.bigram import BigramModel
from pipelinerl.models.tiny_decoder import char_tokenizer
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.observability.events import EventLog
from pipelinerl.roles.controller_role import build_controller
from pipelinerl.roles.trainer_role import canary_of, loop_settings
from pipelinerl.roles.wiring import checkpoints_of, objective_of
from pipelinerl.roles.workers import started
from pipelinerl.simulation.hardware import EngineTimes, TrainerTimes
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.system.http_service import config_of, listen
from pipelinerl.trainers.bigram.trainer import BigramTrainer
from pipelinerl.training.canary_check import LogprobCanaryChecker
from pipelinerl.training.loop import TrainingLoop
from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from trainer_contract.types import LossStats, MicroBatch, Objective

#: Seconds that the simulated devices take: per decode step and row on the engine, and per token on the trainer.
ENGINE: Final = EngineTimes(step_s=0.03, row_s=0.0005)
TRAINER: Final = TrainerTimes(token_s=0.001)
_CONTEXT: Final = 160
_DEADLINE_S: Final = 1200.0
_FOLLOW_S: Final = 0.5
_RECIPE: Final = """
[run]
name = "paced"
steps = 40
[model]
path = "{model}"
[engine]
type = "benchmarks.paced:engine"
slots = 64
context_length = {context}
device = "cpu"
[trainer]
type = "benchmarks.paced:PacedTrainer"
device = "cpu"
[optimizer]
learning_rate = 1e-9
[[domains]]
name = "divisors"
source = "addition"
verifier = "math_answer"
[objective]
preset = "pipelinerl"
[sampling]
group_size = 8
max_tokens = 48
[training]
rollouts_per_step = 64
no_signal = "train"
[evaluation]
problems = 8
interval_steps = 1000000
[checkpoint]
interval_steps = 1000000
"""


def paced_recipe(folder: Path) -> Path:
    """Write a recipe and its model into `folder`; return the recipe's path."""
    model = folder / "model"
    tokenizer = char_tokenizer(alphabet="0123456789")
    BigramModel.random(len(tokenizer), seed=0, scale=0.0, context_length=_CONTEXT).save(model)
    tokenizer.save_pretrained(str(model), save_jinja_files=False)
    recipe = folder / "paced.toml"
    recipe.write_text(_RECIPE.format(model=model, context=_CONTEXT))
    return recipe


def engine(options: EngineOptions) -> Engine:
    """Return a bigram engine whose decode steps take as long as `ENGINE` says."""

    def runner() -> Any:
        model = BigramModel.load(options.model_path)
        runner = BigramRunner(model, rows=options.slots, context_length=options.context_length)
        return PacedRunner(runner, ENGINE.decode_s)

    tokenizer = ChatTokenizer.load(options.model_path)
    return BatchingEngine(options, load=runner, tokenizer=tokenizer, endpoints=endpoints_of(options))


@final
class PacedRunner:
    """A model runner whose decode step of n rows takes `decode_s(n)` seconds."""

    def __init__(self, runner: BigramRunner, decode_s: Callable[[int], float]) -> None:
        self._runner = runner
        self._decode_s = decode_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        until = time.monotonic() + self._decode_s(num_rows)
        sampled = self._runner.decode(num_rows)
        _wait(until)
        return sampled


@final
class PacedTrainer:
    """A bigram trainer whose backward passes take as long as `TRAINER` says."""

    def __init__(self) -> None:
        self._trainer = BigramTrainer()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trainer, name)

    def backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[LossStats]:
        """Compute the gradient, then wait until as much time has passed as a real device would take."""
        tokens = sum(len(each.token_ids) for each in micro_batches)
        until = time.monotonic() + TRAINER.token_s * tokens
        stats = self._trainer.backward(micro_batches, objective)
        _wait(until)
        return stats


def _wait(until: float) -> None:
    time.sleep(max(0.0, until - time.monotonic()))


@final
class _Alternating:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """Judge the answers alternately wrong and correct, without delay."""
        self.lengths += [len(answer.token_ids) for answer in answers]
        outcomes = [Outcome.CORRECT if place % 2 else Outcome.WRONG for place in range(len(answers))]
        return [Judgement(Verdict(outcome=each, reward=float(each is Outcome.CORRECT)), 0.0) for each in outcomes]

    async def close(self) -> None:
        """Do nothing: this verifier holds no resources."""


async def paced_run(recipe: Path, changes: Sequence[str], folder: Path) -> None:
    """Run a recipe to its end, and write the recipe, the events and the lengths of answers to `folder`."""
    config = load(recipe, changes)
    folder.mkdir(parents=True)
    save(config, folder / "recipe.toml")
    options = EngineOptions(
        model_path=config.model.resolved,
        model_id="paced",
        slots=config.engine.slots,
        max_waiting=config.engine.max_waiting,
        context_length=config.engine.context_length,
    )
    verifier, listener = _Alternating(), listen("127.0.0.1", 0)
    settings = config_of(create_app(engine(options), token=None))
    # "auto" runs the application's lifespan, which starts the engine.
    settings.lifespan, settings.timeout_graceful_shutdown = "auto", 1
    server = uvicorn.Server(settings)
    # The engine runs on a separate thread, so that it does not share the event loop with the rest of the run.
    serving = asyncio.create_task(asyncio.to_thread(lambda: asyncio.run(server.serve(sockets=[listener]))))
    async with asyncio.timeout(_DEADLINE_S):
        while not server.started:
            if serving.done():
                await serving
            await asyncio.sleep(0.01)
        await _train(config, folder, f"http://127.0.0.1:{listener.getsockname()[1]}", verifier)
        server.should_exit = True
        await serving
    (folder / "lengths.json").write_text(json.dumps(verifier.lengths))


async def _train(config: RunConfig, folder: Path, url: str, verifier: _Alternating) -> None:
    objective, stream, client = objective_of(config), MemoryStream(), EngineClient()
    workers, pool = started(config, objective, checkpoint=None), EnginePool(client)
    events, controller = EventLog(folder / "events.jsonl"), build_controller(config, None)
    service = ControllerService(controller, name="paced", stream=stream, probe=client, events=events)
    actor = Actor(
        ActorSettings(name="actor-0", groups_in_flight=config.groups_in_flight, block_s=0.05),
        stream=stream,
        maker_of=lambda domain: SingleTurn(pool, lambda _: verifier, attempts=config.actor.attempts),
    )
    loop = TrainingLoop(
        loop_settings(config),
        step=workers.step(),
        objective=objective,
        stream=stream,
        publisher=BroadcastPublisher(client),
        canary_checker=LogprobCanaryChecker(canary_of(config), client),
        checkpoints=checkpoints_of(config, folder),
        restored=None,
    )

    async def trained() -> None:
        await loop.run()

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(service.run())]
            await asyncio.sleep(0)
            pool.update([url])
            await service.perform(EngineRegistered(now=0.0, url=url))
            tasks += [group.create_task(each) for each in (actor.run(), _follow(controller, actor), trained())]
            await service.finished.wait()
            for task in tasks:
                task.cancel()
    finally:
        await loop.close()
        await client.close()
        events.close()
        workers.close()


async def _follow(controller: Controller, actor: Actor) -> None:
    while True:
        actor.follow(model_version=controller.state.version, k=controller.state.knobs.k)
        await asyncio.sleep(_FOLLOW_S)


def main() -> None:
    """Parse the command line, prepare the recipe and run it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="a folder that does not exist yet")
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="changes of the paced recipe")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    asyncio.run(paced_run(paced_recipe(given.folder), given.changes, given.folder / "run"))


if __name__ == "__main__":
    main()
