"""The controller's hands: reads reports, lets `Controller` decide, and carries out what it decided.

    loop     waits for                unblocked by
    reports  entries in `reports`     trainer, actors
    poll     its interval             the clock; each engine has its own deadline

All decisions run on one event loop, one after the other; effects are carried out in order before the next report.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol, final

import msgspec
from pydantic import ValidationError

from inference_contract.errors import ContractError
from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.controller import Controller
from pipelinerl.controller.effects import Effect, Finish, IssuePrompts, Record, Send
from pipelinerl.controller.statement import run_status
from pipelinerl.errors import PipelineError, RecordError
from pipelinerl.messages import EPOCHS, ORDERS, PROMPTS, REPORTS, decode_report, encode
from pipelinerl.observability.events import EventLog
from pipelinerl.observability.status import RunStatus
from pipelinerl.streams.dead_letter import DeadLetters
from pipelinerl.streams.records import encode_order
from pipelinerl.streams.stream import Entry, Stream, fresh_number, parse_id
from pipelinerl.types import PromptOrder, Purpose

log = logging.getLogger("pipelinerl")

#: A trainer reads every directive at once; older ones serve whoever looks into the stream.
_DIRECTIVES_KEPT: Final = 64


class EngineProbe(Protocol):
    """Asks an engine for its load; satisfied by `EngineClient`."""

    async def metrics(self, url: str) -> Mapping[str, float]:
        """Raises ContractError or PipelineError when the engine does not answer in time."""
        ...


@final
class ControllerService:
    """Runs one `Controller` until its run is over."""

    def __init__(
        self,
        controller: Controller,
        *,
        name: str,
        stream: Stream,
        probe: EngineProbe,
        events: EventLog,
        poll_s: float = 1.0,
        elapsed_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`elapsed_s` is the age of a run that goes on, so that its events keep one time line."""
        self.controller = controller
        self._name = name
        self._stream = stream
        self._probe = probe
        self._events = events
        self._poll_s = poll_s
        self._clock = clock
        self._started = clock() - elapsed_s
        self._dead_letters = DeadLetters(stream)
        self._next_entry = 0
        self._next_directive = 0
        self._issued: deque[tuple[int, int]] = deque()  # (entry, index) of training orders, oldest first
        self._turn = asyncio.Lock()
        self.finished = asyncio.Event()

    async def run(self) -> None:
        """Serve until the run is over, which sets `finished`; raises what stops it before."""
        self._next_directive = fresh_number(await self._stream.last_id(ORDERS))
        self._next_entry = fresh_number(await self._stream.last_id(PROMPTS))
        # An epoch after the newest checkpoint may have begun and been cut off: its rollouts may still lie there.
        begun, _ = parse_id(await self._stream.last_id(EPOCHS))
        self.controller.epoch = max(self.controller.epoch, begun)
        # Orders of an earlier controller that still lie there are issued again by this one, where they are wanted.
        await self._stream.trim(PROMPTS, before=f"{self._next_entry}-0")
        self._record("run_started", {"run": self._name, "knobs": self.controller.knobs.to_json()})
        async with asyncio.TaskGroup() as group:
            loops = [group.create_task(self._reports()), group.create_task(self._poll())]
            await self.finished.wait()
            for loop in loops:
                loop.cancel()

    async def perform(self, decide: Callable[[], list[Effect]]) -> None:
        """Take one decision and carry it out; decisions never overlap."""
        async with self._turn:
            for effect in decide():
                await self._carry_out(effect)

    def status(self) -> RunStatus:
        """What the run is doing now."""
        return run_status(self.controller, name=self._name, now=self._clock(), elapsed_s=self._elapsed())

    # --- loops -----------------------------------------------------------------------------------------------------

    async def _reports(self) -> None:
        offset = await self._stream.last_id(REPORTS)
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
            await self._dead_letters.bury(entry, RecordError(f"not a report: {error}"))
            return
        await self.perform(lambda: self.controller.handle(report, now=self._clock()))

    async def _poll(self) -> None:
        while True:
            records = self.controller.fleet.records()
            await asyncio.gather(*(self._ask(record.url) for record in records))
            await self.perform(lambda: self.controller.tick(now=self._clock()))
            alive = self.controller.fleet.records()
            if alive and not self.finished.is_set():  # the end is the last that the log says
                self._record(
                    "engines",
                    {
                        "tokens_per_s": sum(record.tokens_per_s for record in alive),
                        "occupancy": sum(record.occupancy for record in alive) / len(alive),
                        "running": sum(record.metrics.running_sequences for record in alive),
                        "waiting": sum(record.metrics.waiting_sequences for record in alive),
                    },
                )
            await asyncio.sleep(self._poll_s)

    async def _ask(self, url: str) -> None:
        try:
            found = await self._probe.metrics(url)
            known = {name: found[name] for name in EngineMetrics.model_fields if name in found}
            metrics = EngineMetrics.model_validate(known)
        except (ContractError, PipelineError, ValidationError) as error:
            reason = str(error)
            if self.controller.fleet.missed(url, reason):
                await self.perform(lambda: self.controller.engine_left(url, reason))
            return
        if self.controller.fleet.answered(url, metrics, self._clock()):
            await self.perform(lambda: self.controller.engine_returned(url))

    # --- effects ---------------------------------------------------------------------------------------------------

    async def _carry_out(self, effect: Effect) -> None:
        match effect:
            case IssuePrompts(orders):
                await self._issue(orders)
            case Send(directive):
                await self._stream.append(EPOCHS, [b""], first_id=directive.epoch)  # once: later it is a no-op
                await self._stream.append(ORDERS, [encode(directive)], first_id=self._next_directive)
                self._next_directive += 1
                await self._stream.trim(ORDERS, before=f"{self._next_directive - _DIRECTIVES_KEPT}-0")
            case Record(kind, fields):
                self._record(kind, fields)
            case Finish(reason):
                self._record("run_finished", {"reason": reason, "ledger": self.controller.account.ledger()})
                self.finished.set()

    async def _issue(self, orders: list[PromptOrder]) -> None:
        """Append orders, and drop those at the head of the stream that have ended."""
        payloads = [encode_order(order) for order in orders]
        await self._stream.append(PROMPTS, payloads, first_id=self._next_entry)
        self._issued.extend(
            (self._next_entry + i, order.index) for i, order in enumerate(orders) if order.purpose is Purpose.TRAINING
        )
        self._next_entry += len(orders)
        frontier = self.controller.account.consumed.frontier
        while self._issued and self._issued[0][1] < frontier:
            self._issued.popleft()
        if self._issued and self.controller.evaluation is None:
            await self._stream.trim(PROMPTS, before=f"{self._issued[0][0]}-0")

    def _record(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._events.write(kind, elapsed_s=round(self._elapsed(), 3), **fields)

    def _elapsed(self) -> float:
        return self._clock() - self._started
