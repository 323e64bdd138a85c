"""The controller's service: reads reports, lets `Controller` decide, journals decisions and carries them out.

    loop     waits for                unblocked by
    reports  entries in `reports`     trainer, actors
    poll     its interval             the clock
    ask      an engine's answer       the engine, or the poll's deadline; one poll at a time per engine. The engine is
                                      suspect before: when the poll is late (`EngineWatch.is_late`)

All decisions run on one event loop, one after the other. The effects of a decision are carried out in order before the
next report is read. If an input cannot be journaled, or an effect fails, the service ends, since the state in memory
has changed but streams and events have not. The process may be killed between any two effects; see `journal.py`. After
a restart, the service's clock continues from the time of the last decision in the journal, independent of the machine's
clock.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import msgspec
from pydantic import ValidationError

from inference_contract.errors import ContractError
from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.decisions.giving_up import finish
from pipelinerl.controller.decisions.report_checks import implausible
from pipelinerl.controller.decisions.status import assignment_of, run_status
from pipelinerl.controller.decisions.watch import ALIKE, EngineWatch
from pipelinerl.controller.routes import LEASE_S, ActorAssignment, VerifierLease
from pipelinerl.controller.service.journal import Decision, Journal, Recovered
from pipelinerl.controller.state.evaluation import samples_of
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import (
    AnyInput,
    Effect,
    End,
    EngineAnswered,
    EngineIdle,
    EngineInput,
    EngineRestarted,
    EngineTimedOut,
    Finish,
    FleetMeasured,
    HealthCheckMissed,
    IssuePrompts,
    Record,
    ReportReceived,
    Send,
    StreamsLost,
    Ticked,
)
from pipelinerl.controller.state.run_state import RunPhase
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import LedgerError, PipelineError, RecordError, RunFailed
from pipelinerl.messages import (
    DIRECTIVES,
    EPOCHS,
    PROMPTS,
    REPORTS,
    EvaluationDone,
    StepDone,
    decode_report,
    encode,
    kind_of,
)
from pipelinerl.observability.events import EventFollower, EventLog, sentence
from pipelinerl.observability.run_history import Incidents
from pipelinerl.observability.samples import SampleLog
from pipelinerl.observability.status import IncidentStatus, ParameterServerStatus, RestartStatus, RunStatus
from pipelinerl.streams.records import decode_order, encode_order
from pipelinerl.streams.stream import START, DeadLetters, Entry, Stream, fresh_number, parse_id
from pipelinerl.system.cores import busy_seconds
from pipelinerl.types import Purpose

log = logging.getLogger("pipelinerl")

#: Number of directives kept in the stream, for debugging only: a trainer reads each directive when it arrives.
_DIRECTIVES_KEPT: Final = 64
#: Seconds without work after which a drained engine is removed: more than the interval (`REFRESH_S`) at which actors
#: learn that the engine must get no work.
_IDLE_S: Final = 2.0
#: The launcher counts as gone after this many seconds without a request; it polls the status twice a second.
_LAUNCHER_S: Final = 10.0
#: Polls of the engines that show how many rollouts they always had in their queues.
_POLLS_TO_KNOW: Final = 2
#: The status shows at most this many incidents, and reads at most this many bytes of the event log for them.
_MOST_INCIDENTS: Final = 10
_LOG_BYTES: Final = 1 << 22
#: A `count` that is large enough to read all entries of any stream.
_ALL: Final = 2**31


#: Kind of the last event in a run's log, by the way in which the run ended.
_LAST_WORDS: Final = {End.COMPLETED: "run_finished", End.SUSPENDED: "run_suspended", End.FAILED: "run_failed"}


#: Exceptions that `Controller.decide` may raise in the middle of a decision if a report's numbers are inconsistent.
_UNDECIDABLE: Final = (LedgerError, ArithmeticError, LookupError, TypeError, ValueError)


class TransportWatch(Protocol):
    """The servers that a plug-in's transport of weights needs, as the controller shows them."""

    async def run(self, record: Callable[[str, dict[str, Any]], None], *, every_s: float) -> None:
        """Poll the servers until cancelled; `record` events, as kind and fields."""
        ...

    def statuses(self) -> tuple[ParameterServerStatus, ...]:
        """Return the servers for the run's status."""
        ...

    def alarms(self) -> tuple[str, ...]:
        """Return a sentence for each reason why engines get no weights."""
        ...


class ControllerService:
    """Runs one `Controller` until its run is over."""

    def __init__(
        self,
        controller: Controller,
        *,
        name: str,
        stream: Stream,
        probe: EngineClient,
        events: EventLog,
        poll_s: float = 1.0,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        from_journal: bool = False,
        samples: SampleLog | None = None,
        restarts: Callable[[], tuple[RestartStatus, ...]] = lambda: (),
        transport: TransportWatch | None = None,
    ) -> None:
        """Create the service.

        Args:
            probe: polls engines for their metrics.
            elapsed_s: age of a resumed run, so that its events continue the same timeline.
            from_journal: begin with the journal of a controller that died, unless it is incomplete or of another
                launch, instead of with the controller's state: that of a new run, or of a checkpoint.
            samples: log of evaluation answers, for users.
            restarts: returns the launched processes that have died so far, for the status.
            transport: watches the servers that the transport of weights needs; None if it needs none.
        """
        self._transport = transport
        self._restarts = restarts
        self.controller = controller
        self.watch = EngineWatch()
        # Rollouts that no engine had begun, at each poll since they were last given to the controller's decisions.
        self._queues: list[int] = []
        # Seconds for which the cores that engines and trainer share were busy, as of the last step, and its time.
        self._busy: tuple[float | None, float] = (None, 0.0)
        self.verifiers = VerifierLeases(clock)
        self._name = name
        self._stream = stream
        self.probe = probe
        self._events = events
        self._poll_s = poll_s
        self._clock = clock
        self._from_journal = from_journal
        self._log, self._incidents = EventFollower(events.path), Incidents()
        self._samples = samples
        self._started = clock() - elapsed_s
        self._launcher_at = clock()  # as if the launcher had just polled, so that it has time to start polling
        self._ahead = 0.0  # this controller's clock minus the machine's monotonic clock
        self._being_polled: dict[str, float] = {}  # when the poll in flight of an engine began
        self._slow: dict[str, float] = {}  # speeds of slow engines, as of their last events
        self._dead_letters = DeadLetters(stream)
        self._journal: Journal
        self._next_entry = 0
        self._next_directive = 0
        self._issued: deque[tuple[int, int]] = deque()  # (stream entry, order index) of training orders, oldest first
        self._turn = asyncio.Lock()
        self.begun = asyncio.Event()  # set once the state is restored: a restarted controller reads its journal first
        self._over = asyncio.Event()
        self._broken: Exception | None = None
        self.finished = asyncio.Event()

    async def run(self) -> None:
        """Serve until the run is over, then set `finished`.

        Raises RunFailed if the run cannot continue, PipelineError if a decision cannot be journaled or carried out.
        """
        recovered = await Journal.recover(self._stream) if self._from_journal else None
        if recovered is None or recovered.state.launch != self.controller.state.launch:
            await self._begin()
        else:
            await self._continue(recovered)
        self.begun.set()
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._reports()), group.create_task(self._poll())]
            if self._transport is not None:
                watching = self._transport.run(self._note_transport, every_s=self._poll_s)
                loops.append(group.create_task(watching))
            await self._over.wait()
            if self._broken is not None:
                raise self._broken
            for loop in loops:
                loop.cancel()
        failing = self.controller.state.failing
        if failing.reason and not failing.suspends:
            raise RunFailed(failing.reason)

    async def perform(self, given: AnyInput) -> list[Effect]:
        """Let the controller decide on one input, carry out the effects and return them; concurrent calls take turns.

        Raises the errors of `Controller.decide`, and RecordError for a report on which no decision is possible.
        """
        await self.begun.wait()
        async with self._turn:
            self._journal.refuse_unwritable(given)
            try:
                effects = self.controller.decide(given)
            except _UNDECIDABLE as error:
                recovered = await Journal.recover(self._stream) if isinstance(given, ReportReceived) else None
                if recovered is None:
                    raise
                self._replay(recovered)  # undo the half of the decision that was made
                raise RecordError(f"it cannot be processed: {type(error).__name__}: {error}") from error
            if not effects and isinstance(given, Ticked):
                return effects
            try:
                await self._put_into_effect(given, effects)
            except (PipelineError, OSError) as error:
                self._broken = error
                self._over.set()
                raise
            return effects

    async def _put_into_effect(self, given: AnyInput, effects: list[Effect]) -> None:
        number = await self._journal.record(Decision(given, self._next_entry, self._next_directive))
        for effect in effects:
            await self._carry_out(effect, number)
        if self._journal.snapshot_due:
            await self._journal.snapshot(self.controller.state)

    async def now(self) -> float:
        """Return the time to be used in inputs, in seconds; waits until the clock is restored from the journal."""
        await self.begun.wait()
        return self._now()

    def status(self) -> RunStatus:
        """Return the current status of the run."""
        now, elapsed_s = self._now(), self._elapsed()
        status = run_status(self.controller, watch=self.watch, name=self._name, now=now, elapsed_s=elapsed_s)
        waiting_for = status.waiting_for
        if self._events.no_room:
            waiting_for = f"room ({self._events.no_room})"
        elif self._stream.outage:
            waiting_for = f"the stream server, which {self._stream.outage}"
        for event in self._log.new(most_bytes=_LOG_BYTES):  # the log of a resumed run may be long: read a part of it
            self._incidents.take(event)
        servers, alarms = self._transport.statuses() if self._transport else (), self._transport_alarms()
        has_launcher = self._clock() - self._launcher_at < _LAUNCHER_S
        fleet = msgspec.structs.replace(status.fleet, has_launcher=has_launcher)
        return msgspec.structs.replace(
            status,
            restarts=self._restarts(),
            waiting_for="; ".join([waiting_for, *alarms]),
            fleet=fleet,
            parameter_servers=servers,
            alarms=(*alarms, *status.alarms),
            incidents=tuple(
                IncidentStatus(
                    kind=each.kind,
                    what=sentence(each.event),
                    count=each.count,
                    seconds=each.seconds,
                    ongoing=each.since is not None,
                )
                for each in [each for each in self._incidents.ranked() if each.kind != "knobs"][:_MOST_INCIDENTS]
            ),
        )

    def note_launcher(self) -> None:
        """Note that a launcher has polled the status, so it is alive and can start and end engines."""
        self._launcher_at = self._clock()

    def assignment(self) -> ActorAssignment:
        """Return the current settings for actors."""
        assignment = assignment_of(self.controller.state, self.controller.settings)
        speeds = self.watch.speeds.of(assignment.serving)
        return msgspec.structs.replace(assignment, verifiers=self.verifiers.current(), speeds=speeds)

    # --- beginning -------------------------------------------------------------------------------------------------

    async def _begin(self) -> None:
        self._next_directive = fresh_number(await self._stream.last_id(DIRECTIVES))
        self._next_entry = fresh_number(await self._stream.last_id(PROMPTS))
        state = self.controller.state
        # Begin with an epoch (number of a trainer's start) above every earlier one. A resume may go back to an older
        # checkpoint, so rollouts of an epoch after that checkpoint may still be in the stream.
        begun, _ = parse_id(await self._stream.last_id(EPOCHS))
        state.epoch = max(state.epoch, begun)
        # Drop prompt orders of an earlier controller; this controller issues them again if they are needed.
        await self._stream.trim(PROMPTS, before=f"{self._next_entry}-0")
        self._journal = await Journal.begin(self._stream)
        self._journal.reports_offset = await self._stream.last_id(REPORTS)
        await self._journal.snapshot(state)
        self._record("run_started", {"run": self._name, "knobs": state.knobs.to_json()})

    def _replay(self, recovered: Recovered) -> list[Effect]:
        """Restore the journaled state, and return the effects of the last decision."""
        self.controller.state = recovered.state
        effects: list[Effect] = []
        for decision in recovered.decisions:
            effects = self.controller.decide(decision.given)
        return effects

    async def _continue(self, recovered: Recovered) -> None:
        """Continue a dead controller's run: replay the journal, then repeat the effects of the last decision."""
        self._journal = recovered.journal
        number = recovered.number
        self._ahead = recovered.journal.now - self._clock()
        effects = self._replay(recovered)
        entries = await self._stream.read({PROMPTS: START}, count=_ALL, block_s=0)
        for entry in entries:
            try:
                order = decode_order(entry.payload)
            except RecordError as error:
                await self._dead_letters.bury(entry, error)
                continue
            if order.purpose is Purpose.TRAINING:
                self._issued.append((parse_id(entry.entry_id)[0], order.index))
        if recovered.decisions:
            last = recovered.decisions[-1]
            self._next_entry, self._next_directive = last.next_prompt, last.next_directive
        else:
            self._next_entry = fresh_number(await self._stream.last_id(PROMPTS))
            self._next_directive = fresh_number(await self._stream.last_id(DIRECTIVES))
        written = self._events.count_recent(decision=number)
        for effect in effects:
            recorded = isinstance(effect, Record | Finish) and written > 0
            written -= recorded
            await self._carry_out(effect, number, recorded=recorded)
        # The dead controller may have finished the run without writing the run's last event.
        if self.controller.state.phase is RunPhase.FINISHED:
            recorded = any(self._events.count_recent(kind=kind) for kind in _LAST_WORDS.values())
            over = finish(self.controller.state, self.controller.settings)
            await self._carry_out(over, number, recorded=recorded)
            return
        log.warning("the controller has restarted and continues at version %d", self.controller.state.version)
        self._record("controller_returned", {"model_version": self.controller.state.version})

    # --- loops -----------------------------------------------------------------------------------------------------

    async def _reports(self) -> None:
        offset = self._journal.reports_offset
        while True:
            entries = await self._stream.read({REPORTS: offset}, count=512, block_s=1.0)
            for entry in entries:
                offset = entry.entry_id
                await self._report(entry)
            if entries:
                await self._stream.trim(REPORTS, before=offset)

    async def _report(self, entry: Entry) -> None:
        try:
            report = decode_report(entry.payload)
        except msgspec.DecodeError as error:
            await self._refuse(entry, "unreadable", str(error))
            return
        if wrong := implausible(self.controller.state, report):
            await self._refuse(entry, kind_of(report), wrong)
            return
        if isinstance(report, EvaluationDone) and report.shown is not None:
            if self._samples is not None:
                evaluation = self.controller.state.evaluations.current
                self._samples.put(samples_of(report, current=evaluation, time=time.time()))
            report = msgspec.structs.replace(report, shown=None)  # `shown` affects no decision, so it is not journaled
        try:
            queued, busy = None, None
            if isinstance(report, StepDone):
                if len(self._queues) >= _POLLS_TO_KNOW:
                    queued, self._queues = min(self._queues), []
                busy = self._busy_share()
            received = ReportReceived(now=self._now(), report=report, entry_id=entry.entry_id, queued=queued, busy=busy)
            await self.perform(received)
        except RecordError as error:
            if self._broken is not None:
                raise
            await self._refuse(entry, kind_of(report), str(error))

    async def _refuse(self, entry: Entry, kind: str, reason: str) -> None:
        log.error("a report (%s) is rejected: %s", kind, reason)
        await self._dead_letters.bury(entry, RecordError(f"a report ({kind}) is rejected: {reason}"))
        self._record("report_refused", {"report": kind, "reason": reason})

    async def _poll(self) -> None:
        async with asyncio.TaskGroup() as polls:
            slept_at = self._clock()
            while True:
                # After a pause of this process, answers that have arrived look late.
                now = self._clock()
                waiting = self._being_polled.items() if now - slept_at < 2 * self._poll_s else ()
                for url in [url for url, began in waiting if self.watch.is_late(url, now - began)]:
                    if self.controller.state.fleet.by_url[url].lifecycle is EngineLifecycle.HEALTHY:
                        await self.perform(HealthCheckMissed(now=self._now(), url=url))
                able = []
                for record in self.controller.state.fleet.records():
                    if record.lifecycle is EngineLifecycle.EXPELLED:
                        self.watch.forget(record.url)
                    elif record.url not in self._being_polled:  # a slow engine must not delay the others
                        able.append(record)
                for url in self.watch.to_poll(able, now=self._now(), every_s=self._poll_s):
                    self._being_polled[url] = self._clock()
                    polls.create_task(self._poll_engine(url))
                await self.perform(Ticked(now=self._now()))
                async with self._turn:
                    if not await self._journal.whole():
                        # Reissue all work that the stream server may have lost, and write a snapshot, which also stops
                        # a replaced controller. The snapshot comes last: a controller that dies before it leaves an
                        # incomplete journal, so that its successor notices the loss.
                        given = StreamsLost(now=self._now())
                        await self._put_into_effect(given, self.controller.decide(given))
                        await self._journal.snapshot(self.controller.state)
                self._record_loads()
                self._record_slow_engines()
                self._queues.append(self._queued())
                if self.controller.settings.elastic is not None:
                    loads = [self.watch.load(url).occupancy for url in self.controller.state.fleet.serving()]
                    occupancy = sum(loads) / len(loads) if loads else 0.0
                    await self.perform(FleetMeasured(now=self._now(), occupancy=occupancy))
                slept_at = self._clock()
                await asyncio.sleep(self._poll_s)

    async def _poll_engine(self, url: str) -> None:
        began = self._clock()
        change: EngineInput | None = None
        try:
            metrics = await self.probe.metrics(url)
            took_s = self._clock() - began
            known = {name: metrics[name] for name in EngineMetrics.model_fields if name in metrics}
            restarted = self.watch.answered(url, EngineMetrics.model_validate(known), self._now(), took_s=took_s)
            record, idle_since = self.controller.state.fleet.by_url[url], self.watch.load(url).idle_since
            if restarted:
                change = EngineRestarted(now=self._now(), url=url)
            elif record.lifecycle in (EngineLifecycle.SUSPECT, EngineLifecycle.DIRTY, EngineLifecycle.DEAD):
                change = EngineAnswered(now=self._now(), url=url)
            elif record.lifecycle is EngineLifecycle.DRAINING and idle_since is not None:
                is_idle = self._now() - max(idle_since, record.draining_since) >= _IDLE_S
                change = EngineIdle(now=self._now(), url=url) if is_idle else None
        except (ContractError, PipelineError, ValidationError) as error:
            lifecycle = self.controller.state.fleet.by_url[url].lifecycle  # it may have changed during the poll
            is_dead = self.watch.on_missed_poll(url)
            if is_dead and (lifecycle.is_alive or lifecycle is EngineLifecycle.DIRTY):
                change = EngineTimedOut(now=self._now(), url=url, reason=str(error))
            elif lifecycle is EngineLifecycle.HEALTHY:
                change = HealthCheckMissed(now=self._now(), url=url)
        if change is not None:
            await self.perform(change)
        del self._being_polled[url]

    def _queued(self) -> int:
        """Return the rollouts that no engine has begun: those that wait in engines, and those that no actor has."""
        state = self.controller.state
        in_engines = sum(self.watch.load(url).metrics.waiting_sequences for url in state.fleet.serving())
        held = sum(alive.groups_in_flight for alive, _ in state.actors.values())
        complete = int(state.trainer.last_step.get("waiting_groups", 0))
        unclaimed = max(0, state.account.in_flight - held - complete - state.knobs.groups_per_step)
        return in_engines + unclaimed * state.knobs.max_group_size

    def _busy_share(self) -> float | None:
        """Return the share of the cores that were busy since the last call; None unless engines and trainer share."""
        cores, (busy_before, before) = self.controller.settings.cores, self._busy
        busy_s, now = busy_seconds(cores) if cores else None, self._clock()
        self._busy = busy_s, now
        if busy_s is None or busy_before is None or now <= before:
            return None
        return min(1.0, (busy_s - busy_before) / (len(cores) * (now - before)))

    def _record_slow_engines(self) -> None:
        """Record an event for each engine that has become slow, or slower or faster than the last event says."""
        speeds = self.watch.speeds.of(self.controller.state.fleet.serving())
        slow = {url: speed for url, speed in speeds.items() if speed < 1}
        self._slow = {url: speed for url, speed in self._slow.items() if url in slow}
        for url, speed in slow.items():
            if not 1 / ALIKE < speed / self._slow.get(url, 1.0) < ALIKE:
                self._record("engine_slow", {"url": url, "speed": speed})
                self._slow[url] = speed

    def _record_loads(self) -> None:
        loads = [self.watch.load(record.url) for record in self.controller.state.fleet.records()]
        if loads and not self.finished.is_set():  # no event may follow the run's last event
            self._record(
                "engines",
                {
                    "tokens_per_s": sum(load.tokens_per_s for load in loads),
                    "occupancy": sum(load.occupancy for load in loads) / len(loads),
                    "running": sum(load.metrics.running_sequences for load in loads),
                    "waiting": sum(load.metrics.waiting_sequences for load in loads),
                    "decode_steps": sum(load.metrics.decode_steps_total for load in loads),
                    "row_steps": sum(load.metrics.occupied_slot_steps_total for load in loads),
                    "prompt_tokens": sum(load.metrics.prompt_tokens_total for load in loads),
                    "busy_s": sum(load.metrics.busy_s_total for load in loads),
                },
            )

    # --- effects ---------------------------------------------------------------------------------------------------

    async def _carry_out(self, effect: Effect, decision: int, *, recorded: bool = False) -> None:
        match effect:
            case IssuePrompts(orders):
                payloads = [encode_order(order) for order in orders]
                await self._stream.append(PROMPTS, payloads, first_id=self._next_entry)
                for entry, order in enumerate(orders, self._next_entry):
                    if order.purpose is Purpose.TRAINING:
                        self._issued.append((entry, order.index))
                self._next_entry += len(orders)
                frontier = self.controller.state.account.consumed.frontier
                while self._issued and self._issued[0][1] < frontier:
                    self._issued.popleft()
                if self._issued and self.controller.state.evaluations.current is None:
                    await self._stream.trim(PROMPTS, before=f"{self._issued[0][0]}-0")
            case Send(directive):
                # Record the epoch in its stream; repeated appends with the same id have no effect.
                await self._stream.append(EPOCHS, [b""], first_id=directive.epoch)
                await self._stream.append(DIRECTIVES, [encode(directive)], first_id=self._next_directive)
                self._next_directive += 1
                await self._stream.trim(DIRECTIVES, before=f"{self._next_directive - _DIRECTIVES_KEPT}-0")
            case Record(kind, fields):
                if kind == "stalled":
                    fields = {**fields, "waits_for": "; ".join([fields["waits_for"], *self._transport_alarms()])}
                    log.warning("no progress for %.0f s: waiting for %s", fields["still_s"], fields["waits_for"])
                if kind == "alarm":
                    log.warning("step %d: %s", fields["step"], fields["what"])
                if not recorded:
                    self._record(kind, {**fields, "decision": decision})
            case Finish(reason, end):
                ledger = self.controller.state.account.ledger()
                if not recorded:
                    self._record(_LAST_WORDS[end], {"reason": reason, "ledger": ledger, "decision": decision})
                self.finished.set()
                self._over.set()

    def _record(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._events.write(kind, elapsed_s=round(self._elapsed(), 3), **fields)

    def _note_transport(self, kind: str, fields: Mapping[str, Any]) -> None:
        if not self.finished.is_set():  # no event may follow the run's last event
            log.warning("%s: %s", kind, fields.get("what") or fields.get("url") or fields["domain"])
            step = {"step": self.controller.state.version} if kind.startswith("alarm") else {}
            self._record(kind, {**fields, **step})

    def _transport_alarms(self) -> tuple[str, ...]:
        return self._transport.alarms() if self._transport is not None else ()

    def _now(self) -> float:
        return self._clock() + self._ahead

    def _elapsed(self) -> float:
        return self._clock() - self._started


#: Maximum number of verifier services; limited because every actor receives the whole list each second.
MOST_SERVICES: Final = 256


class VerifierLeases:
    """Verifier services by URL, each valid for `LEASE_S` after its last offer; `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._leases: dict[str, tuple[VerifierLease, float]] = {}

    def offer(self, lease: VerifierLease) -> bool:
        """Add a verifier service or renew its lease; return False if there are `MOST_SERVICES` other services."""
        if lease.url not in self._leases:
            if len(self._leases) >= MOST_SERVICES and len(self.current()) >= MOST_SERVICES:
                return False
            log.info("the verifier service at %s joins; it judges %s", lease.url, ", ".join(lease.domains))
        self._leases[lease.url] = lease, self._clock() + LEASE_S
        return True

    def withdraw(self, url: str) -> None:
        """Remove a verifier service; an unknown service is ignored."""
        if self._leases.pop(url, None) is not None:
            log.info("the verifier service at %s leaves", url)

    def current(self) -> tuple[VerifierLease, ...]:
        """Drop expired verifier services, and return those that may be used now."""
        now = self._clock()
        for url in [url for url, (_, until) in self._leases.items() if now >= until]:
            del self._leases[url]
            log.warning("the verifier service at %s has been silent for %g s", url, LEASE_S)
        return tuple(lease for lease, _ in self._leases.values())
