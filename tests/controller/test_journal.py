"""A controller killed before or after any one of its side effects leaves a run that nobody can tell from an undisturbed
one: the same prompts, the same directives, the same events, the same ledger.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelinerl.controller.inputs import EngineOffered, Ticked
from pipelinerl.controller.journal import JOURNAL, Decision, Journal
from pipelinerl.controller.service import ControllerService, Start
from pipelinerl.messages import (
    ORDERS,
    PROMPTS,
    REPORTS,
    Consumed,
    Directive,
    EvaluationDone,
    GroupFailed,
    Message,
    Progress,
    Published,
    StepDone,
    TrainerReady,
    TrainerStopped,
    decode_directive,
    encode,
)
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.streams.memory_stream import MemoryStream
from tests.controller.world import ENGINE, controller

NEVER = 10**9


class Killed(Exception):
    """Stands for kill -9: nothing of the process is left."""


@dataclass
class Killer:
    """Kills at the n-th point that is passed; there is one before and one after each side effect."""

    at: int
    passed: int = 0

    def point(self) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise Killed


@dataclass
class MortalStream:
    """A stream that outlives its writer, who may be killed at each write; keeps what was ever appended."""

    inner: MemoryStream
    killer: Killer
    history: dict[str, list[bytes]] = field(default_factory=dict)

    async def append(self, stream: str, payloads: Sequence[bytes], *, first_id: int | None = None) -> int:
        self.killer.point()
        new = await self.inner.append(stream, payloads, first_id=first_id)
        self.history.setdefault(stream, []).extend(payloads[len(payloads) - new :])
        self.killer.point()
        return new

    async def trim(self, stream: str, *, before: str) -> None:
        self.killer.point()
        await self.inner.trim(stream, before=before)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class MortalLog(EventLog):
    """An event log whose writer may be killed after each line."""

    killer: Killer

    def write(self, kind: str, **fields: Any) -> None:
        super().write(kind, **fields)
        self.killer.point()


class Healthy:
    """Every engine answers."""

    async def metrics(self, url: str) -> dict[str, float]:
        return {"slots": 4.0}


def answers(version: int) -> list[Message]:
    """Of the evaluation that began at `version`."""
    return [
        EvaluationDone(
            order_id=f"eval-{version}-{i:06d}",
            index=i,
            correct=True,
            judged=True,
            oldest_version=version,
            newest_version=version,
            num_tokens=1,
        )
        for i in range(3)
    ]


def reports(steps: int) -> list[Message]:
    """What trainer and actors say in a run of two groups a step, of which every fifth order fails."""

    def published(version: int) -> Published:
        return Published(
            epoch=1, model_version=version, membership=2, pauses_s={ENGINE: 0.1}, failed={}, send_s=0.1, total_s=0.2
        )

    said: list[Message] = [
        TrainerReady(report_id="ready-1", incarnation="1", model_version=0, consumed=Consumed()),
        published(0),
    ]
    said += answers(0)
    frontier = failed = 0
    for version in range(1, steps + 1):
        if version % 5 == 0:
            order = f"prompt-{frontier:06d}"
            said.append(GroupFailed(order_id=order, index=frontier, purpose="training", reason="no engine"))
            frontier, failed = frontier + 1, failed + 1
            account = Consumed(trained=2 * version - 2, failed=failed, frontier=frontier)
            said.append(Progress(epoch=1, model_version=version - 1, consumed=account))
        frontier += 2
        account = Consumed(trained=2 * version, failed=failed, frontier=frontier)
        said.append(
            StepDone(
                report_id=f"e1-step-{version}", epoch=1, model_version=version, consumed=account, stats={"loss": 0.5}
            )
        )
        said.append(published(version))
        said += answers(version) if version % 5 == 0 and version < steps else []
    return [*said, TrainerStopped(epoch=1, model_version=steps), *answers(steps)]


@dataclass(frozen=True)
class Outcome:
    """What others can see of a run."""

    prompts: list[bytes]
    directives: list[Directive]
    events: list[dict[str, Any]]


async def live(folder: Path, *, steps: int, kill_at: int) -> tuple[Outcome, int]:
    """A whole run whose controller is killed at most once, and how many points it passed."""
    killer, inner = Killer(kill_at), MemoryStream()
    stream = MortalStream(inner, killer)
    start = Start.AFRESH
    for _ in range(2):
        made = controller(steps=steps)
        with MortalLog(folder / "events.jsonl") as log:
            log.killer = killer
            service = ControllerService(
                made, name="test", stream=stream, probe=Healthy(), events=log, poll_s=3600.0, start=start
            )
            try:
                await _serve(service, inner, reports(steps))
                break
            except* Killed:
                # A process that was killed before its journal began has done nothing: the launcher starts it again.
                start = Start.FROM_JOURNAL
    told = [event for event in read_events(folder / "events.jsonl") if event["kind"] not in VARYING]
    events = [{k: v for k, v in event.items() if k not in ("time", "elapsed_s", "decision")} for event in told]
    directives = [decode_directive(payload) for payload in stream.history[ORDERS]]
    return Outcome(stream.history[PROMPTS], directives, events), killer.passed


#: Events that tell of the controller's own life, or of the moment.
VARYING = ("controller_returned", "run_started", "engines")


async def _serve(service: ControllerService, stream: MemoryStream, said: list[Message]) -> None:
    """The service runs to its end; the engine offers itself until it is taken, then the others speak, once."""

    async def offer() -> None:
        while await stream.length(JOURNAL) == 0:
            await asyncio.sleep(0)
        await service.perform(EngineOffered(now=0.0, url=ENGINE, incarnation="1"))
        await stream.append(REPORTS, [encode(report) for report in said], first_id=1)

    async with asyncio.TaskGroup() as group:
        group.create_task(offer())
        group.create_task(service.run())


async def every_crash_point(tmp_path: Path, *, steps: int) -> None:
    undisturbed, points = await live(tmp_path, steps=steps, kill_at=NEVER)
    assert len(undisturbed.directives) >= steps and points > 10 * steps
    assert undisturbed.events[-1]["reason"] == f"all {steps} steps are done"
    for kill_at in range(1, points + 1):
        folder = tmp_path / str(kill_at)
        outcome, _ = await live(folder, steps=steps, kill_at=kill_at)
        assert outcome.prompts == undisturbed.prompts, f"killed at point {kill_at}: other prompts"
        assert outcome.directives == undisturbed.directives, f"killed at point {kill_at}: other directives"
        assert outcome.events == undisturbed.events, f"killed at point {kill_at}: other events"


async def test_a_controller_killed_at_any_point_changes_nothing(tmp_path: Path) -> None:
    await every_crash_point(tmp_path, steps=20)


async def test_a_journal_with_a_gap_is_not_believed() -> None:
    stream = MemoryStream()
    journal = await Journal.begin(stream)
    assert await Journal.recover(stream) is None, "nothing was written"
    await journal.snapshot(controller().state)
    await journal.record(Decision(Ticked(now=0.0), 1, 1))
    found = await Journal.recover(stream)
    assert found is not None and len(found[1].decisions) == 1 and await journal.whole()
    journal.number += 1  # an entry that the server has lost
    await journal.record(Decision(Ticked(now=0.0), 1, 1))
    assert not await journal.whole()
    assert await Journal.recover(stream) is None
    await journal.snapshot(controller().state)
    found = await Journal.recover(stream)
    assert await journal.whole() and found is not None and found[1].decisions == []
    assert await stream.length(JOURNAL) == 1


async def test_the_state_comes_back_as_it_was() -> None:
    """All of it: what a journal leaves out, a controller that comes back would have forgotten."""
    stream, made = MemoryStream(), controller()
    made.decide(EngineOffered(now=1.0, url=ENGINE, incarnation="a"))
    for report in reports(4)[:-1]:
        with suppress(KeyError):
            made.handle(report, now=2.0)  # type: ignore[arg-type]
    journal = await Journal.begin(stream)
    await journal.snapshot(made.state)
    found = await Journal.recover(stream)
    assert found is not None
    assert found[1].state == made.state
