"""The roles of a run of mock engines: the real controller, actors, parameter server, and a trainer without a model.

The controller's process keeps when each order was issued, by the stream it appends to; all else in it, and in the
actors' processes, is what the roles do. `StandInTrainer` reads rollouts, makes batches, reports and publishes by the
training loop's own parts; a step takes it no time, and proofs of weights are taken for given.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, cast, final

import numpy as np
import uvloop

from benchmarks.mock_engine import LAYOUT
from benchmarks.mock_fleet import end_with_parent, open_many_files, reply
from pipelinerl.config.recipe import load
from pipelinerl.controller.service.api import create_api
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.enums import NoSignal
from pipelinerl.messages import (
    PROMPTS,
    CanaryChecked,
    ConsumedReport,
    Directive,
    Published,
    Question,
    StepDone,
    TrainerReady,
)
from pipelinerl.observability.events import EventLog
from pipelinerl.roles import actor_role, parameter_server_role
from pipelinerl.roles.controller_role import build_controller
from pipelinerl.roles.process import Identity, freeze_gc, run_until_signalled
from pipelinerl.staleness import StalenessBounds
from pipelinerl.streams.open_stream import open_stream
from pipelinerl.streams.records import decode_order
from pipelinerl.streams.stream import Stream
from pipelinerl.system.http_service import listen, serve_until
from pipelinerl.training.controller_link import ControllerLink
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from pipelinerl.training.rollouts.rollout_reader import Arrivals, RolloutReader
from pipelinerl.types import Outcome, Problem, Purpose, Verdict
from pipelinerl.weights.publisher import Publication, Publisher

_PATIENCE_S: Final = 300.0


@final
class EveryOther:
    """The recipe's verifier: an answer is right if it has an even number of letters."""

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge at once."""
        right = len(completion_text) % 2 == 0
        return Verdict(outcome=Outcome.CORRECT if right else Outcome.WRONG, reward=float(right))


@final
class _TimedStream:
    """A stream that remembers when prompts were appended."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._appended: list[tuple[float, Sequence[bytes]]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def append(self, stream: str, payloads: Sequence[bytes], *, first_id: int | None = None) -> int:
        """See `Stream.append`."""
        if stream == PROMPTS:
            self._appended.append((time.monotonic(), payloads))
        return await self._stream.append(stream, payloads, first_id=first_id)

    def issued(self) -> dict[int, float]:
        """When each training order was first appended, by its seed, in monotonic seconds."""
        found: dict[int, float] = {}
        for at, payloads in self._appended:
            for order in map(decode_order, payloads):
                if order.purpose is Purpose.TRAINING:
                    found.setdefault(order.seed, at)
        return found


def controller_process(asked: Connection, recipe: Path, run_dir: Path, redis_url: str, token: str) -> None:
    """The controller: says its URL, then, whenever it is asked, when each order was issued."""
    end_with_parent()
    _quiet(run_dir / "controller.out")
    open_many_files()

    async def serve() -> None:
        config = load(str(recipe))
        stream, client = _TimedStream(await open_stream(redis_url, namespace="scale")), EngineClient(token=token)
        with listen("127.0.0.1", 0) as listener, EventLog(run_dir / "events.jsonl") as events:
            service = ControllerService(
                build_controller(config, None), name="scale", stream=cast(Stream, stream), probe=client, events=events
            )
            freeze_gc()
            asked.send(f"http://127.0.0.1:{listener.getsockname()[1]}")
            asyncio.get_running_loop().add_reader(asked.fileno(), lambda: _told(asked, stream))
            running = asyncio.create_task(service.run())
            await serve_until(create_api(service, token=token), listener, over=running)

    uvloop.run(serve())


def _told(asked: Connection, stream: _TimedStream) -> None:
    asked.recv()
    reply(asked, stream.issued())


def actor_process(recipe: Path, run_dir: Path, name: str, redis_url: str, controller_url: str, token: str) -> None:
    """An actor, as its role runs it."""
    end_with_parent()
    _quiet(run_dir / f"{name}.out")
    open_many_files()
    run_until_signalled(actor_role.run, _identity(recipe, run_dir, name, redis_url, controller_url, token))


def parameter_server_process(recipe: Path, run_dir: Path, port: int, token: str) -> None:
    """A parameter server, as its role runs it."""
    end_with_parent()
    _quiet(run_dir / "parameter-server-0.out")
    run_until_signalled(
        parameter_server_role.run, _identity(recipe, run_dir, "parameter-server-0", "", "", token, port=port)
    )


def _identity(
    recipe: Path, run_dir: Path, name: str, redis_url: str, controller_url: str, token: str, *, port: int = 0
) -> Identity:
    return Identity(
        config=load(str(recipe)),
        run_dir=run_dir,
        name=name,
        redis_url=redis_url,
        controller_url=controller_url,
        token=token,
        port=port,
    )


def _quiet(path: Path) -> None:
    """What this process says goes into a file."""
    said = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(said, stream.fileno())
    os.close(said)


def _weights() -> Iterator[tuple[str, Any]]:
    yield "none", np.zeros(8, np.int8)


@final
class StandInTrainer:
    """Takes steps of so many rollouts as they come, until it is cancelled; `steps` lists when, and of how many each."""

    def __init__(self, stream: Stream, publisher: Publisher, *, rollouts_per_step: int) -> None:
        self._publisher = publisher
        self._budget = StepBudget(rollouts=rollouts_per_step)
        self.ledger = ConsumedLedger()
        self._batcher = Batcher(
            ledger=self.ledger, lineage=Lineage(0, 0), no_signal=NoSignal.TRAIN, teaches=lambda group: True
        )
        self._reader = RolloutReader(stream, offsets={}, frontier=lambda: self.ledger.frontier)
        self._link = ControllerLink(stream, self._reader, deadline_s=_PATIENCE_S)
        self._publishing: asyncio.Task[None] | None = None
        self.version = 0
        self.steps: list[tuple[float, int]] = []
        self.published_s: list[float] = []
        """How long each publication took."""

    async def run(self) -> None:
        """Train until cancelled."""
        await self._reader.start()
        await self._ask(TrainerReady(report_id="ready-1", incarnation="1", model_version=0, consumed=self._consumed()))
        self._batcher.lineage = Lineage(self._link.current.epoch, 0)
        while True:
            bounds = StalenessBounds(1, self._link.current.knobs.k)
            groups = self._batcher.take(self._budget, producing=self.version + 1, bounds=bounds)
            if groups is None:
                await self._take_in(await self._link.read())
                continue
            self.version += 1
            self.steps.append((time.monotonic(), sum(len(group.rollouts) for group in groups)))
            epoch = self._link.current.epoch
            await self._ask(
                StepDone(
                    report_id=f"e{epoch}-step-{self.version}",
                    epoch=epoch,
                    model_version=self.version,
                    consumed=self._consumed(),
                    stats={"rollouts": float(self.steps[-1][1]), "waiting_groups": float(self._batcher.num_waiting)},
                    orders=[group.index for group in groups],
                )
            )

    async def close(self) -> None:
        """Wait for the publication under way, and end."""
        if self._publishing is not None:
            await asyncio.gather(self._publishing, return_exceptions=True)
        await self._publisher.close()

    async def _ask(self, question: Question) -> None:
        async for arrivals in self._link.wait_for_answer(question):
            await self._take_in(arrivals)

    async def _take_in(self, arrivals: Arrivals) -> None:
        for group in arrivals.groups:
            self._batcher.offer(group)
        for directive in arrivals.directives:
            self._batcher.end(directive.failed, GroupOutcome.FAILED)
            self._batcher.end(directive.stale, GroupOutcome.STALE)
            if directive.publish_to:
                if self._publishing is not None:
                    await self._publishing
                self._publishing = asyncio.create_task(self._publish(directive, self.version))

    async def _publish(self, directive: Directive, version: int) -> None:
        report = await self._publisher.publish(
            Publication(
                version=version,
                epoch=directive.epoch,
                layout=LAYOUT,
                weights=_weights,
                engines=directive.publish_to,
                membership=directive.membership,
            )
        )
        self.published_s.append(report.total_s)
        await self._link.report(
            Published(
                epoch=report.epoch,
                model_version=report.version,
                membership=directive.membership,
                pauses_s=dict(report.pauses_s),
                failed=dict(report.failed),
                send_s=report.send_s,
                total_s=report.total_s,
                directive=directive.answers,
            )
        )
        if proven := [url for url in directive.to_verify if url in report.pauses_s]:
            await self._link.report(
                CanaryChecked(
                    epoch=report.epoch,
                    model_version=report.version,
                    membership=directive.membership,
                    worst=dict.fromkeys(proven, 0.0),
                )
            )

    def _consumed(self) -> ConsumedReport:
        counts: dict[str, Any] = {str(fate): count for fate, count in self.ledger.counts.items()}
        return ConsumedReport(**counts, frontier=self.ledger.frontier, beyond=sorted(self.ledger.beyond))
