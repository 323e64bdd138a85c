"""Tests of the controller's service on a stream in memory: reports, group requests, journal, polls, and the end."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from pipelinerl.config.sections import ElasticSection
from pipelinerl.controller.decisions import watch
from pipelinerl.controller.service.journal import JOURNAL, Journal
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.inputs_and_effects import EngineRegistered, EngineRemoved, KnobsPatched
from pipelinerl.controller.state.lag import LagRule
from pipelinerl.errors import EngineUnreachable
from pipelinerl.messages import (
    DIRECTIVES,
    EPOCHS,
    PROMPTS,
    REPORTS,
    CanaryChecked,
    ConsumedReport,
    ShownAnswer,
    ShownProblem,
    StepDone,
    TrainerStopped,
    decode_directive,
    encode,
)
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.observability.samples import SampleLog, read_samples
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.records import decode_order
from pipelinerl.streams.stream import DEAD_LETTERS, START
from tests.controller.world import ENGINE, alive, answered, controller, published, ready, step_done
from tests.patience import PATIENCE_S

DEADLINE_S = PATIENCE_S
FACTS = {"slots": 4.0, "running_sequences": 2.0}


class Probe:
    """An `EngineProbe` that counts requests. The test sets the metrics, and which engines hang (`off`)."""

    def __init__(self):
        self.answer = FACTS
        self.off = set()
        self.polls = Counter()

    async def metrics(self, url):
        self.polls[url] += 1
        if url in self.off:
            await asyncio.sleep(DEADLINE_S)
        if isinstance(self.answer, EngineUnreachable):
            raise self.answer
        return self.answer


@dataclass
class Running:
    service: ControllerService
    stream: MemoryStream
    probe: Probe
    path: Path
    task: asyncio.Task[None]
    marks_sent: int = 0

    @property
    def controller(self):
        return self.service.controller

    @property
    def state(self):
        return self.controller.state

    async def tell(self, *messages):
        """Append reports to the stream and wait until the service has read them."""
        self.marks_sent += 1
        mark = alive("mark", groups_done=self.marks_sent)
        await self.stream.append(REPORTS, [m if isinstance(m, bytes) else encode(m) for m in (*messages, mark)])
        await self.until(lambda: self.controller.state.actors.get("mark", (None, 0.0))[0] == mark)

    def stream_length(self, name):
        return len(self.stream._logs[name].ids) if name in self.stream._logs else 0

    async def until(self, happened):
        async with asyncio.timeout(DEADLINE_S):
            while not happened():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.005)

    def events(self, kind):
        return [event for event in read_events(self.path) if event["kind"] == kind]

    async def payloads(self, name):
        return [entry.payload for entry in await self.stream.read({name: START}, count=10_000, block_s=0)]

    async def directives(self):
        return [decode_directive(payload) for payload in await self.payloads(DIRECTIVES)]

    async def start(self):
        """Let the engine join, and the trainer become ready and publish version 0."""
        await self.service.perform(EngineRegistered(now=0.0, url=ENGINE))
        await self.tell(ready("1"))
        epoch, membership = self.state.epoch, self.state.fleet.membership
        await self.tell(weights(0, epoch=epoch, membership=membership))
        assert self.state.fleet.serving() == [], "it has yet to prove them"
        proved = CanaryChecked(epoch=epoch, model_version=0, membership=membership, worst={ENGINE: 1e-6})
        await self.tell(proved)
        assert self.state.fleet.serving() == [ENGINE]


def step(version):
    return step_done(version, ConsumedReport(trained=2 * version, frontier=2 * version), stats={"loss": 0.5})


def weights(version, *, epoch=1, membership=99):
    directive = f"e{epoch}-step-{version}" if version else "ready-1"
    return published([ENGINE], version=version, epoch=epoch, membership=membership, directive=directive)


def service_on(stream, events, made=None, *, name="test", poll_s=3600.0, **rest):
    """Return a service of `made`, by default of a new controller, whose engines answer unless `probe` is given."""
    given = {"probe": Probe()} | rest
    return ControllerService(made or controller(), name=name, stream=stream, events=events, poll_s=poll_s, **given)


@asynccontextmanager
async def served(service):
    task = asyncio.create_task(service.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def running(path, stream=None, samples=None, transport_of=lambda probe: None, **changes):
    made, probe, stream = controller(**{"evaluation_problems": 0, **changes}), Probe(), stream or MemoryStream()
    with EventLog(path / "events.jsonl") as events:
        about = {"probe": probe, "samples": samples, "transport": transport_of(probe)}
        service = service_on(stream, events, made, poll_s=0.01, **about)
        lives = (path / "events.jsonl").read_text().count("run_started")
        async with served(service) as task:
            world = Running(service, stream, probe, path / "events.jsonl", task)
            await world.until(lambda: len(world.events("run_started")) > lives)
            yield world


async def test_texts_of_evaluation_answers_are_kept_as_samples_but_not_written_to_the_journal(tmp_path):
    shown = ShownProblem(
        problem_id="p",
        prompt="user: say it",
        ground_truth="it",
        answers=[ShownAnswer("a text of its own", "wrong", 0.0, "why", "length", 3, [(4, 2), (5, 1)])],
    )
    done = answered("eval-0-1-000000", 0, correct=0, num_tokens=3, domain="d", tags=["t"], shown=shown)
    async with running(tmp_path, samples=SampleLog(tmp_path / "samples", "evaluation", max_bytes=2**20)) as run:
        await run.start()
        await run.tell(done, encode(done).replace(b"a text of its own", b"\xff text of its own"))
        journal = b"".join(await run.payloads(JOURNAL))
        assert run.stream_length(DEAD_LETTERS) == 1, "what is no text is no report"
    assert b"eval-0-1-000000" in journal and b"a text of its own" not in journal
    async with asyncio.timeout(DEADLINE_S):
        while not (kept := read_samples(tmp_path)):
            await asyncio.sleep(0.01)
    (sample,) = kept
    assert (sample.kind, sample.step, sample.domain, sample.tags) == ("evaluation", 0, "d", ("t",))
    (answer,) = sample.answers
    assert (answer.text, answer.outcome, answer.reason, answer.finish_reason) == (
        "a text of its own", "wrong", "why", "length"
    )  # fmt: skip


def forget(stream, name, entries):
    """Simulate a killed stream server that lost its newest entries."""
    kept = stream._logs[name]
    del kept.ids[-entries:], kept.payloads[-entries:]
    kept.last = kept.ids[-1]


async def test_groups_lost_by_the_stream_server_are_requested_again_before_the_trainer_starves(tmp_path):
    """Two group requests are lost; the trainer has enough other groups, so it never reports starvation."""
    async with running(tmp_path, k=8.0) as run:
        run.state.lag = LagRule(steps=math.inf, rest=100)
        await run.start()
        await run.tell(step(1), weights(1))
        issued = [decode_order(payload) for payload in await run.payloads(PROMPTS)]
        assert [order.index for order in issued[-2:]] == [8, 9]
        forget(run.stream, PROMPTS, 2)
        forget(run.stream, JOURNAL, 2)
        await run.until(lambda: run.events("orders_lost"))
        assert [event["orders"] for event in run.events("orders_lost")] == [8], "all that have not ended"
        await run.tell()
        orders = [decode_order(payload) for payload in await run.payloads(PROMPTS)]
        assert orders[-2:] == issued[-2:], "the same orders"
        assert await run.service._journal.whole() and await Journal.recover(run.stream) is not None
        for version in range(2, 10):
            await run.tell(step(version), weights(version))
        left = [decode_order(payload).index for payload in await run.payloads(PROMPTS)]
        assert left == list(range(18, 26)), "what has ended is trimmed, both copies of it"
        assert run.state.account.in_flight == 8 and len(run.events("orders_lost")) == 1


async def test_restarted_run_never_reuses_an_epoch_number(tmp_path):
    """The checkpoint has no epoch, but the stream records epochs 1 and 2, so the next trainer gets epoch 3."""
    stream = MemoryStream()
    async with running(tmp_path, stream) as run:
        await run.start()
        await run.tell(ready("2"))
        assert run.state.epoch == 2
    async with running(tmp_path, stream) as run:
        await run.start()
        assert run.state.epoch == 3
        assert await stream.last_id(EPOCHS) == "3-0"


async def test_engine_that_stops_answering_is_lost_and_rejoins_later(tmp_path):
    stream = MemoryStream()
    async with running(tmp_path, stream) as run:
        await run.start()
        run.probe.answer = EngineUnreachable("connection refused")
        await run.until(lambda: run.events("engine_lost"))
        assert run.state.fleet.members() == []
        lost = run.service.status().incidents[0]
        assert (lost.kind, lost.what, lost.ongoing) == ("engine_lost", f"{ENGINE}: connection refused", True)
        run.probe.answer = FACTS
        await run.until(lambda: run.state.fleet.members() == [ENGINE])
        await run.until(lambda: run.stream_length(DIRECTIVES) == 2)
        assert (await run.directives())[-1].publish_to == [ENGINE], "it is given weights without waiting for a step"
        await run.service.perform(EngineRemoved(now=0.0, engine=ENGINE))
        await run.until(lambda: not run.service.watch.load(ENGINE).metrics.running_sequences)
        polls_before, ticks = run.probe.polls[ENGINE], len(run.events("engines"))
        await run.until(lambda: len(run.events("engines")) > ticks + 3)
        assert run.probe.polls[ENGINE] == polls_before, "an expelled engine is not polled"
    async with running(tmp_path, stream) as run:
        assert run.service.status().incidents[0].kind == "engine_lost", "also of the time before a restart"


async def test_queue_of_the_engines_is_given_with_a_step_once_two_polls_have_shown_it(tmp_path, monkeypatch):
    async with running(tmp_path) as run:
        await run.start()
        given, perform = [], run.service.perform

        async def performed(change):
            given.append(change)
            await perform(change)

        monkeypatch.setattr(run.service, "perform", performed)
        run.probe.answer = FACTS | {"waiting_sequences": 3.0}
        await run.until(lambda: run.service.watch.load(ENGINE).metrics.waiting_sequences == 3)
        run.service._queues.clear()
        await run.until(lambda: len(run.service._queues) >= 2)
        run.service._poll_s = PATIENCE_S
        await run.tell(step(1), step(2))
        queued = [each.queued for each in given if isinstance(getattr(each, "report", None), StepDone)]
        assert queued == [7, None], "three wait in the engine, four for an actor"


async def test_unreachable_machine_does_not_delay_polls_of_other_engines(tmp_path):
    off = "http://off"
    async with running(tmp_path) as run:
        await run.start()
        run.probe.off.add(off)
        await run.service.perform(EngineRegistered(now=0.0, url=off))
        await run.until(lambda: run.probe.polls[off])
        ticks = len(run.events("engines"))
        run.probe.answer = EngineUnreachable("connection refused")
        await run.until(lambda: run.events("engine_lost"))
        assert [lost["url"] for lost in run.events("engine_lost")] == [ENGINE]
        await run.until(lambda: len(run.events("engines")) > ticks + 5)
        assert run.probe.polls[off] == 1, "one poll at a time"


async def test_engine_that_is_late_to_answer_a_poll_is_suspect_before_the_poll_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(watch, "_LATE_S", 0.01)
    async with running(tmp_path) as run:
        await run.start()
        await run.until(lambda: run.state.fleet.serving() == [ENGINE])
        run.probe.off.add(ENGINE)
        await run.until(lambda: run.events("engine_suspect"))
        assert run.service.watch.load(ENGINE).tokens_per_s == 0.0, "rates of the past are not shown"


async def test_slow_engine_is_named_in_an_event_and_in_the_assignment_of_actors(tmp_path):
    async with running(tmp_path) as run:
        await run.start()
        await run.until(lambda: run.state.fleet.serving() == [ENGINE])
        run.state.fleet.join(other := "http://other", "1")
        run.state.fleet.on_published(other, 0, membership=run.state.fleet.membership)
        assert run.state.fleet.on_verified(other, 0, membership=run.state.fleet.membership)
        for _ in range(20):
            for url, busy_s in ((ENGINE, 1.0), (other, 4.0)):
                run.service.watch.speeds.note(url, steps=100, rows=400, busy_s=busy_s)
        assert run.service.assignment().speeds == {other: 0.25}
        await run.until(lambda: run.events("engine_slow"))
        assert [(event["url"], event["speed"]) for event in run.events("engine_slow")] == [(other, 0.25)]
        named = [engine.note for engine in run.service.status().fleet.engines if engine.url == other]
        assert named == ["slow: 0.25 of the fleet's speed"]


@pytest.mark.parametrize("elastic", [None, ElasticSection()], ids=["fixed number of engines", "elastic"])
async def test_load_of_engines_is_journaled_only_in_runs_with_elastic_scaling(tmp_path, elastic):
    async with running(tmp_path, engines_min={"bigram": 0}, engines_max={"bigram": 2}, elastic=elastic) as world:
        await world.start()
        await world.until(lambda: world.probe.polls[ENGINE] > 3)
        journal = await world.payloads(JOURNAL)
        measured = [entry for entry in journal if b"FleetMeasured" in entry]
        assert bool(measured) is (elastic is not None)


@pytest.mark.parametrize("nonsense", [{"slots": 1.5}, {"generated_tokens_total": float("nan")}])
async def test_unknown_engine_metrics_are_ignored_and_invalid_ones_do_not_stop_the_run(tmp_path, nonsense):
    async with running(tmp_path) as run:
        run.probe.answer = FACTS | {"temperature_of_the_room": 21.5}
        await run.start()
        await run.until(lambda: run.service.watch.load(ENGINE).metrics.running_sequences == 2)
        run.probe.answer = nonsense
        await run.until(lambda: run.events("engine_lost"))
        assert not run.task.done()


async def test_controller_applies_the_effects_of_each_decision_before_it_makes_the_next_one(tmp_path, monkeypatch):
    """The stream server is slow in this test."""
    async with running(tmp_path) as run:
        await run.start()
        append, decide, seen = run.stream.append, run.controller.decide, []

        async def slowly(*args, **rest):
            await asyncio.sleep(0.01)
            return await append(*args, **rest)

        def watched(given):
            if isinstance(given, KnobsPatched):
                seen.append(len(run.events("knobs")))
            return decide(given)

        monkeypatch.setattr(run.stream, "append", slowly)
        monkeypatch.setattr(run.controller, "decide", watched)
        changes = [KnobsPatched(now=0.0, changes={"temperature": 1.0 + i / 10}, who="test", time=0.0) for i in range(3)]
        await asyncio.gather(*(run.service.perform(change) for change in changes))
        assert seen == [0, 1, 2], "each decision saw the events of those before it"


async def test_controller_service_ends_when_the_run_ends(tmp_path):
    async with running(tmp_path, steps=1) as run:
        await run.start()
        await run.stream.append(REPORTS, [encode(step(1)), encode(TrainerStopped(epoch=1, model_version=1))])
        await asyncio.wait_for(run.task, DEADLINE_S)
        assert run.service.finished.is_set()
        (end,) = run.events("run_finished")
        assert end["reason"] == "all 1 steps are done"
        assert end["ledger"]["issued"] == sum(count for outcome, count in end["ledger"].items() if outcome != "issued")
