"""Tests of the journal: killing the controller before or after any side effect does not change the run."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
import pytest

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.service.journal import JOURNAL, Decision, Journal
from pipelinerl.controller.state.inputs_and_effects import (
    AnyInput,
    EngineAnswered,
    EngineRegistered,
    EngineRemoved,
    EnginesRequested,
    EngineTimedOut,
    HealthCheckMissed,
    KnobsPatched,
    ReportReceived,
    StreamsLost,
    Ticked,
)
from pipelinerl.controller.state.run_state import RunPhase, RunState
from pipelinerl.enums import Pin
from pipelinerl.errors import FencedError, UserError
from pipelinerl.messages import (
    DIRECTIVES,
    LAYOUT,
    PROMPTS,
    REPORTS,
    CanaryChecked,
    ConsumedReport,
    GroupFailed,
    OrdersEnded,
    TrainerStopped,
    decode_directive,
    encode,
)
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.streams.memory_stream import MemoryStream
from tests.controller.service.test_service import served, service_on, weights
from tests.controller.world import ENGINE, World, alive, answered, controller, joins, ready, received, step_done
from tests.patience import PATIENCE_S, SOON_S

NEVER = 10**9


class Killed(Exception):
    """Raised to simulate kill -9."""


@dataclass
class Killer:
    """Simulates a kill of the process at its crash point number `at`; crash points lie before and after side effects.

    The process stays dead, so each later point raises `Killed`, too, until `born` starts a new process.
    """

    at: int
    passed: int = 0

    def point(self):
        self.passed += 1
        if self.passed >= self.at:
            raise Killed

    def born(self):
        if self.passed >= self.at:
            self.at = NEVER


@dataclass
class MortalStream:
    """A stream whose writer may be killed at each write; it keeps everything that was ever appended."""

    inner: MemoryStream
    killer: Killer
    history: dict[str, list[bytes]] = field(default_factory=dict)

    async def append(self, stream, payloads, *, first_id=None):
        self.killer.point()
        new = await self.inner.append(stream, payloads, first_id=first_id)
        self.history.setdefault(stream, []).extend(payloads[len(payloads) - new :])
        self.killer.point()
        return new

    async def trim(self, stream, *, before):
        self.killer.point()
        await self.inner.trim(stream, before=before)

    def __getattr__(self, name):
        return getattr(self.inner, name)


class MortalLog(EventLog):
    """An event log whose writer may be killed after each line."""

    killer: Killer

    def write(self, kind, **fields):
        super().write(kind, **fields)
        self.killer.point()


def answers(version):
    number = -(-version // 5) + 1
    return [answered(f"eval-{version}-{number}-{i:06d}", i, versions=(version, version)) for i in range(3)]


def reports(steps):
    """Return the reports of a run with two groups per step, in which every fifth group fails."""

    messages = [
        ready("1"),
        weights(0, membership=2),
        CanaryChecked(epoch=1, model_version=0, membership=2, worst={ENGINE: 1e-6}),
    ]
    messages += answers(0)
    frontier = failed = 0
    for version in range(1, steps + 1):
        if version % 5 == 0:
            order = f"prompt-{frontier:06d}"
            messages.append(GroupFailed(order_id=order, index=frontier, purpose="training", reason="no engine"))
            frontier, failed = frontier + 1, failed + 1
            account = ConsumedReport(trained=2 * version - 2, failed=failed, frontier=frontier)
            messages.append(OrdersEnded(epoch=1, model_version=version - 1, consumed=account))
        frontier += 2
        account = ConsumedReport(trained=2 * version, failed=failed, frontier=frontier)
        messages += [step_done(version, account, stats={"loss": 0.5}), weights(version, membership=2)]
        messages += answers(version) if version % 5 == 0 and version < steps else []
    return [*messages, TrainerStopped(epoch=1, model_version=steps), *answers(steps)]


async def live(folder, *, steps, kill_at):
    """Run to the end, and kill the controller at most once; return what others see, and the number of crash points."""
    killer, inner = Killer(kill_at), MemoryStream()
    stream = MortalStream(inner, killer)
    from_journal = False
    for _ in range(2):
        killer.born()
        made = controller(steps=steps)
        with MortalLog(folder / "events.jsonl") as log:
            log.killer = killer
            service = service_on(stream, log, made, from_journal=from_journal)
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(offer(service, inner, reports(steps)))
                    group.create_task(service.run())
                break
            except* Killed:
                # The launcher restarts the controller, even if it was killed before it wrote a journal.
                from_journal = True
    recorded = [event for event in read_events(folder / "events.jsonl") if event["kind"] not in VARYING]
    events = [{k: v for k, v in event.items() if k not in ("time", "elapsed_s", "decision")} for event in recorded]
    directives = [decode_directive(payload) for payload in stream.history[DIRECTIVES]]
    return {"prompts": stream.history[PROMPTS], "directives": directives, "events": events}, killer.passed


#: Events that may differ: they describe the controller's own process or depend on the time.
VARYING = ("controller_returned", "run_started", "engines")


async def offer(service, stream, messages):
    """Once the service has a journal, register the engine and send the reports."""
    while await stream.length(JOURNAL) == 0:
        await asyncio.sleep(0)
    await service.perform(joins(ENGINE, now=await service.now()))
    await stream.append(REPORTS, [encode(report) for report in messages], first_id=1)


@pytest.mark.parametrize("steps", [10, pytest.param(20, marks=pytest.mark.chaos)])
async def test_killing_the_controller_at_any_point_does_not_change_the_run(tmp_path, steps):
    undisturbed, points = await live(tmp_path, steps=steps, kill_at=NEVER)
    assert len(undisturbed["directives"]) >= steps and points > 10 * steps
    assert undisturbed["events"][-1]["reason"] == f"all {steps} steps are done"
    for kill_at in range(1, points + 1):
        outcome, _ = await live(tmp_path / str(kill_at), steps=steps, kill_at=kill_at)
        for name, seen in outcome.items():
            assert seen == undisturbed[name], f"killed at point {kill_at}: other {name}"


async def test_restarted_controller_ends_the_run_if_that_was_decided_before_the_restart(tmp_path):
    """Another input was journaled after the decision to end, so a restart repeats only the effects of that input."""
    stream, made = MemoryStream(), controller(steps=1, evaluation_problems=0)
    made.decide(joins(ENGINE))
    for number, report in enumerate(reports(1)):
        made.decide(ReportReceived(now=0.0, report=report, entry_id=f"{number}-0"))
    assert made.state.phase is RunPhase.FINISHED
    journal = await Journal.begin(stream)
    await journal.snapshot(made.state)
    await journal.record(Decision(ReportReceived(now=0.0, report=alive(), entry_id="9-0"), 9, 9))
    for _ in range(2):
        with EventLog(tmp_path / "events.jsonl") as log:
            service = service_on(stream, log, controller(steps=1), from_journal=True)
            await asyncio.wait_for(service.run(), PATIENCE_S)
    recorded = read_events(tmp_path / "events.jsonl")
    assert [event["reason"] for event in recorded if event["kind"] == "run_finished"] == ["all 1 steps are done"]


async def test_journal_with_a_missing_entry_is_not_recovered():
    stream = MemoryStream()
    journal = await Journal.begin(stream)
    assert await Journal.recover(stream) is None, "nothing was written"
    await journal.snapshot(controller().state)
    await journal.record(Decision(Ticked(now=0.0), 1, 1))
    recovered = await Journal.recover(stream)
    assert recovered is not None and len(recovered.decisions) == 1 and await journal.whole()
    journal.number += 1  # skip a number, as if the stream server had lost an entry
    await journal.record(Decision(Ticked(now=0.0), 1, 1))
    assert not await journal.whole()
    assert await Journal.recover(stream) is None
    await journal.snapshot(controller().state)
    recovered = await Journal.recover(stream)
    assert await journal.whole() and recovered is not None and recovered.decisions == []
    assert await stream.length(JOURNAL) == 1


@pytest.mark.parametrize("from_journal", [False, True])
async def test_replaced_controller_stops_before_its_decisions_have_any_effect(tmp_path, from_journal):
    stream = MemoryStream()

    @asynccontextmanager
    async def serving(name, from_journal):
        with EventLog(tmp_path / f"{name}.jsonl") as log:
            service = service_on(stream, log, name=name, from_journal=from_journal)
            async with served(service) as running:
                await service.perform(joins(f"http://{name}"))
                yield service, running

    change = KnobsPatched(now=0.0, changes={"k": 9}, who="test", time=0.0)
    async with serving("first", False) as (first, its_end), serving("second", from_journal) as (second, _):
        for _ in range(2):
            with pytest.raises(FencedError, match="another controller has taken over"):
                await first.perform(change)
            assert not await first._journal.whole()
        with pytest.raises(ExceptionGroup) as ended:
            await asyncio.wait_for(its_end, PATIENCE_S)
        assert ended.group_contains(FencedError), "its state is no longer that of the run"
        await second.perform(change)
        assert not await first._journal.whole() and await second._journal.whole()
        assert "knobs" not in {event["kind"] for event in read_events(tmp_path / "first.jsonl")}
        assert "knobs" in {event["kind"] for event in read_events(tmp_path / "second.jsonl")}


@pytest.mark.parametrize(("launch", "members"), [("this", ["http://first"]), ("another", [])])
async def test_journal_of_an_earlier_launch_is_ignored(tmp_path, launch, members):
    """A controller restarted while resuming a run must not continue the run of the previous launch."""
    before = controller()
    before.state.launch = "this"
    before.decide(joins("http://first"))
    stream = MemoryStream()
    await (await Journal.begin(stream)).snapshot(before.state)
    made = controller()
    made.state.launch = launch
    with EventLog(tmp_path / "events.jsonl") as log:
        service = service_on(stream, log, made, from_journal=True)
        async with served(service):
            await service.perform(Ticked(now=0.0))
    assert (made.state.launch, made.state.fleet.members()) == (launch, members)


@pytest.mark.parametrize("snapshot", [False, True])
@pytest.mark.parametrize("uptime_s", [5.0, 1e9])
async def test_controllers_clock_continues_from_the_journal(tmp_path, uptime_s, snapshot):
    """Deadlines must keep their remaining time after a reboot or on another machine."""
    stream = MemoryStream()

    @asynccontextmanager
    async def serving(clock_s, from_journal):
        with EventLog(tmp_path / "events.jsonl") as log:
            service = service_on(stream, log, clock=lambda: clock_s, from_journal=from_journal)
            async with served(service):
                yield service

    async with serving(10_000.0, False) as first:
        await first.perform(received(alive(), await first.now()))
        if snapshot:
            await first._journal.snapshot(first.controller.state)
    async with serving(uptime_s, True) as second:
        assert await second.now() == 10_000.0
        assert second.status().actors[0].silent_s == 0.0


async def test_journal_that_another_controller_is_writing_is_detected():
    stream = MemoryStream()
    assert not await Journal.is_being_written(stream, for_s=0.01), "no controller has written yet"
    journal = await Journal.begin(stream)
    await journal.snapshot(controller().state)
    assert not await Journal.is_being_written(stream, for_s=0.01), "the writer has stopped"
    looking = asyncio.create_task(Journal.is_being_written(stream, for_s=PATIENCE_S))
    await asyncio.sleep(0.01)
    await journal.record(Decision(Ticked(now=0.0), 1, 1))
    assert await asyncio.wait_for(looking, SOON_S), "the write is detected immediately"


async def test_controller_that_retries_a_journal_write_is_not_mistaken_for_a_second_controller():
    stream = MemoryStream()
    journal = await Journal.begin(stream)
    await journal.snapshot(controller().state)
    append = stream.append

    async def twice(*args, **rest):
        await append(*args, **rest)
        return await append(*args, **rest)

    stream.append = twice
    await journal.record(Decision(Ticked(now=0.0), 1, 1))
    assert await journal.whole()


def brought_back(state, since, **recipe):
    made = controller(**recipe)
    made.state = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=RunState)
    for given in since:
        made.decide(given)
    return made.state


def random_run(seed, *, deaths, **recipe):
    """Return a reproducible run of random events, whose controller is killed at random."""
    made = controller(k=random.Random(seed).choice([1.0, 2.0, 4.0, math.inf]), **recipe)
    run = World(made, random.Random(seed))
    snapshot, since, decide = msgspec.msgpack.encode(made.state), [], made.decide

    def mortal(given):
        nonlocal snapshot
        since.append(msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=AnyInput))
        effects = decide(given)
        if deaths is not None and deaths.random() < 0.05:
            if deaths.random() < 0.3:
                snapshot = msgspec.msgpack.encode(made.state)
                since.clear()
            made.state = brought_back(msgspec.msgpack.decode(snapshot, type=RunState), since, **recipe)
        return effects

    made.decide = mortal
    run.begin()
    surprises = [
        HealthCheckMissed(now=0.0, url=ENGINE),
        EngineAnswered(now=0.0, url=ENGINE),
        EnginesRequested(now=0.0, type="bigram", replaces=ENGINE),
        EngineTimedOut(now=0.0, url=ENGINE, reason="test"),
        EngineRemoved(now=0.0, engine="engine-1"),
        joins("http://engine-1", name="engine-1"),
    ]
    while run.finished is None:
        run.act()
        if run.rng.random() < 0.002:
            j = run.rng.choice([1, 2, 3])
            run.give(KnobsPatched(now=0.0, changes={"j": j, "k": j + 2, "domain_weights.a": 3}, who="test", time=0.0))
        if run.rng.random() < 0.005:
            run.give(StreamsLost(now=0.0))
        if run.rng.random() < 0.01:
            run.give(run.rng.choice(surprises))
            run.give(EngineAnswered(now=0.0, url=ENGINE))
            run.give(EngineRegistered(now=0.0, url=ENGINE))
    return run


def same_with_and_without_deaths(seed, **recipe):
    undisturbed = random_run(seed, deaths=None, **recipe)
    mortal = random_run(seed, deaths=random.Random(~seed), **recipe)
    assert mortal.orders_issued == undisturbed.orders_issued, f"seed {seed}: other prompts"
    assert mortal.controller.state == undisturbed.controller.state, f"seed {seed}: another state, another ledger"


@pytest.mark.parametrize("seed", [*range(16), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(16, 40))])
def test_controller_killed_at_random_makes_the_same_decisions(seed):
    same_with_and_without_deaths(seed)


@pytest.mark.parametrize("seed", range(6))
def test_controller_restart_preserves_group_sizes_and_the_evaluation_in_progress(seed):
    other = EvaluationSet(name="hard", place=1, problems=4, max_tokens=8, samples=2, interval_steps=3)
    same_with_and_without_deaths(seed, large=5, rollouts_per_step=8, other_sets=(other,), pin=Pin.AUTO)


@pytest.mark.parametrize("older", [{}, {"layout": 2}])
async def test_journal_of_another_layout_version_is_rejected_before_its_state_is_decoded(older):
    """The oldest snapshots have no layout version; they would decode as new snapshots with missing fields."""
    stream = MemoryStream()
    snapshot = {"type": "JournalSnapshot", "state": {"launch": "", "trainer_heard": None}, "reports_offset": "0-0"}
    await stream.append(JOURNAL, [msgspec.msgpack.encode(snapshot | older)], first_id=1)
    layout = older.get("layout", 1)
    with pytest.raises(
        UserError, match=rf"must be of layout {LAYOUT}, got layout {layout}: it was begun by another version"
    ):
        await Journal.recover(stream)


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_ten_thousand_random_runs_are_the_same_with_and_without_controller_kills():
    for seed in range(10_000):
        same_with_and_without_deaths(seed)
