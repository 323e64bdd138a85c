"""A whole run of paced devices in one process: real controller, actor, engine over HTTP, broadcast and training loop.

    python -m benchmarks.paced_run FOLDER section.key=value …

Only the streams are in memory and the verifier is a coin: a run's processes cost seconds of a processor before they
work, and their own time is not what the simulator of schedules is asked for. It leaves
recipe, events and the lengths of answers behind. Everything is made from the recipe by what the roles make it with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, final

import uvicorn

from benchmarks.paced import engine, paced_recipe
from pipelinerl.actor.actor import Actor, ActorSettings
from pipelinerl.actor.single_turn import SingleTurn
from pipelinerl.config.recipe import RunConfig, load, save
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.inputs import EngineRegistered
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.engines.http.pool import EnginePool
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.options import EngineOptions
from pipelinerl.observability.events import EventLog
from pipelinerl.roles.controller_role import build_controller
from pipelinerl.roles.trainer_role import canary_of, loop_settings
from pipelinerl.roles.wiring import checkpoints_of, objective_of
from pipelinerl.roles.workers import started
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.system.http_service import config_of, listen
from pipelinerl.training.loop import TrainingLoop
from pipelinerl.training.publish.canary_check import LogprobCanaryChecker
from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.verifier import Judgement, SampledAnswer
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher

_DEADLINE_S: Final = 1200.0
_FOLLOWS_S: Final = 0.5


@final
class _Coin:
    """Every second answer is right, by its length; it keeps the lengths."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def judge(self, problem: Problem, answers: Sequence[SampledAnswer]) -> list[Judgement]:
        """The verdicts, at once."""
        self.lengths += [len(answer.token_ids) for answer in answers]
        return [Judgement(_verdict(place), 0.0) for place, _ in enumerate(answers)]

    async def close(self) -> None:
        """Nothing was started."""


def paced_run(recipe: Path, changes: Sequence[str], folder: Path) -> None:
    """Run it to its end; what it leaves behind lies in `folder`."""
    config = load(recipe, changes)
    folder.mkdir(parents=True)
    save(config, folder / "recipe.toml")
    coin = _Coin()
    options = EngineOptions(
        model_path=config.model.resolved,
        model_id="paced",
        slots=config.engine.slots,
        max_waiting=config.engine.max_waiting,
        context_length=config.engine.context_length,
    )
    with _served(create_app(engine(options), token=None)) as url:
        asyncio.run(_train(config, folder, url, coin))
    (folder / "lengths.json").write_text(json.dumps(coin.lengths))


async def _train(config: RunConfig, folder: Path, url: str, coin: _Coin) -> None:
    objective, stream, client = objective_of(config), MemoryStream(), EngineClient()
    workers, pool, events = started(config, objective, checkpoint=None), EnginePool(client), EventLog(_log(folder))
    controller = build_controller(config, None)
    service = ControllerService(controller, name="paced", stream=stream, probe=client, events=events)
    actor = Actor(
        ActorSettings(name="actor-0", groups_in_flight=config.groups_in_flight, block_s=0.05),
        stream=stream,
        maker_of=lambda domain: SingleTurn(pool, lambda _: coin, attempts=config.actor.attempts),
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
    try:
        async with asyncio.timeout(_DEADLINE_S), asyncio.TaskGroup() as group:
            serving = group.create_task(service.run())
            await asyncio.sleep(0)
            pool.update([url])
            await service.perform(EngineRegistered(now=0.0, url=url))
            others = [
                group.create_task(actor.run()),
                group.create_task(_follow(controller, actor)),
                group.create_task(_whole(loop)),
            ]
            await service.finished.wait()
            for task in (serving, *others):
                task.cancel()
    finally:
        await loop.close()
        await client.close()
        events.close()
        workers.close()


async def _whole(loop: TrainingLoop) -> None:
    await loop.run()


async def _follow(controller: Controller, actor: Actor) -> None:
    """What an actor's role asks its controller for."""
    while True:
        actor.follow(model_version=controller.state.version, k=controller.state.knobs.k)
        await asyncio.sleep(_FOLLOWS_S)


@contextmanager
def _served(app: Any) -> Iterator[str]:
    """The application on a thread of its own; its base URL."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(_with_lifespan(config_of(app)))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
    thread.start()
    deadline = time.monotonic() + _DEADLINE_S
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise RuntimeError("the engine's server has not started")
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(_DEADLINE_S)
        listener.close()


def _with_lifespan(config: uvicorn.Config) -> uvicorn.Config:
    """With a lifespan, in which the engine is started, and a short end."""
    config.lifespan, config.timeout_graceful_shutdown = "auto", 1
    return config


def _log(folder: Path) -> Path:
    return folder / "events.jsonl"


def _verdict(place: int) -> Verdict:
    return Verdict(outcome=Outcome.CORRECT if place % 2 else Outcome.WRONG, reward=float(place % 2))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="made anew")
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="of the paced recipe")
    given = parser.parse_args()
    given.folder.mkdir(parents=True)
    paced_run(paced_recipe(given.folder), given.changes, given.folder / "run")


if __name__ == "__main__":
    main()
