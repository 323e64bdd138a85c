"""Reading of rollouts and directives: `RolloutReader` reads the streams, `ControllerLink` exchanges messages.

Each actor has one partition of rollouts, read by offset. A checkpoint saves, for each partition, the offset before the
first group that still waits to be trained, so that a resumed trainer reads this group again. It also reads later groups
again that were already trained or dropped; `ConsumedLedger` recognises and ignores these.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from pipelinerl.errors import DeadlineError, FencedError, RecordError
from pipelinerl.messages import (
    DIRECTIVES,
    EPOCHS,
    MOST_AHEAD,
    REPORTS,
    ROLLOUTS,
    ControlMessage,
    Directive,
    GroupFailed,
    Question,
    decode_directive,
    encode,
)
from pipelinerl.streams.records import decode_group, named_order
from pipelinerl.streams.stream import START, DeadLetters, Entry, Fence, Stream, parse_id
from pipelinerl.types import Purpose, RolloutGroup

#: Stream whose only entry identifies the stream server's data. Offsets are meaningless for other data.
_IDENTITY: Final = "identity"


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The result of one read: groups and directives, each in the order of their stream."""

    groups: list[RolloutGroup]
    directives: list[Directive]


class RolloutReader:
    """Reader of all rollout partitions and of the controller's directives."""

    def __init__(
        self,
        stream: Stream,
        *,
        offsets: dict[str, str],
        rescan_s: float = 1.0,
        frontier: Callable[[], int] = lambda: 0,
    ) -> None:
        """Groups below `frontier` have ended; an index `MOST_AHEAD` or more above it is invalid."""
        self._frontier = frontier
        self._stream = stream
        self._dead_letters = DeadLetters(stream)
        self._offsets = dict(offsets)
        self._waiting: dict[str, dict[int, str]] = {}
        self._directives_offset = START
        self._identity = ""
        self._rescan_s = rescan_s
        self._scanned_at = float("-inf")

    async def start(self) -> None:
        """Skip directives sent to an earlier trainer; forget saved offsets if the stream server's data was replaced."""
        self._directives_offset = await self._stream.last_id(DIRECTIVES)
        # The server ignores this entry if the stream has one already, so the first identity stays.
        await self._stream.append(_IDENTITY, [uuid.uuid4().hex.encode()], first_id=1)
        (identity,) = await self._stream.read({_IDENTITY: START}, count=1, block_s=1.0)
        if self._offsets.pop(_IDENTITY, None) != identity.payload.decode():
            self._offsets.clear()
        self._identity = identity.payload.decode()

    async def read(self, *, block_s: float, count: int = 256) -> Arrivals:
        now = time.monotonic()
        if now - self._scanned_at >= self._rescan_s:
            self._scanned_at = now
            for partition in await self._stream.streams(ROLLOUTS):
                self._offsets.setdefault(partition, START)
        entries = await self._stream.read(
            {DIRECTIVES: self._directives_offset, **self._offsets}, count=count, block_s=min(block_s, self._rescan_s)
        )
        groups: list[RolloutGroup] = []
        directives: list[Directive] = []
        for entry in entries:
            if entry.stream == DIRECTIVES:
                directives += await self._decoded(entry)
                continue
            try:
                groups.append(self._decoded_group(entry))
            except RecordError as error:
                await self._dead_letters.bury(entry, error)
                await self._report_lost(entry, error)
        return Arrivals(groups, directives)

    async def _report_lost(self, entry: Entry, error: RecordError) -> None:
        """Report an unreadable group to the controller as failed, unless its index is unreadable or out of range."""
        index, frontier = named_order(entry.payload), self._frontier()
        if index is not None and frontier <= index < frontier + MOST_AHEAD:
            reason = f"its group cannot be read: {error}"
            lost = GroupFailed(order_id=f"prompt-{index:06d}", index=index, purpose=Purpose.TRAINING, reason=reason)
            await self._stream.append(REPORTS, [encode(lost)])

    async def read_directives(self, *, block_s: float) -> list[Directive]:
        entries = await self._stream.read({DIRECTIVES: self._directives_offset}, count=16, block_s=block_s)
        return [directive for entry in entries for directive in await self._decoded(entry)]

    def safe_offsets(self, is_waiting: Callable[[int], bool]) -> dict[str, str]:
        """Return each partition's offset to save: before its first group that `is_waiting`, by index."""
        safe = dict(self._offsets)
        for partition, seen in self._waiting.items():
            waiting = {index: entry_id for index, entry_id in seen.items() if is_waiting(index)}
            self._waiting[partition] = waiting
            if waiting:
                first, _ = min(map(parse_id, waiting.values()))
                safe[partition] = f"{first - 1}-0"
        return {_IDENTITY: self._identity, **safe}

    async def trim(self, offsets: dict[str, str], epoch: int) -> None:
        """Delete entries that no kept checkpoint would read again. Raises FencedError if a later trainer has begun."""
        if offsets.get(_IDENTITY) == self._identity:
            for partition in offsets.keys() - {_IDENTITY}:
                await self._stream.trim(partition, before=offsets[partition], fence=Fence(EPOCHS, epoch))

    async def _decoded(self, entry: Entry) -> list[Directive]:
        self._directives_offset = entry.entry_id
        try:
            return [decode_directive(entry.payload)]
        except msgspec.DecodeError as error:
            await self._dead_letters.bury(entry, RecordError(f"not a directive: {error}"))
            return []

    def _decoded_group(self, entry: Entry) -> RolloutGroup:
        self._offsets[entry.stream] = entry.entry_id
        group = decode_group(entry.payload)
        if group.index >= self._frontier() + MOST_AHEAD:
            raise RecordError(f"group {group.group_id} has the index {group.index}, which was not issued yet")
        # If a group arrives twice, keep the position of the first copy: the second may be dropped as a duplicate, and
        # must not hold back the offset.
        self._waiting.setdefault(entry.stream, {}).setdefault(group.index, entry.entry_id)
        return group


log = logging.getLogger("pipelinerl")

#: Interval in seconds after which an unanswered report is sent again.
RESEND_S: Final = 5.0
#: Longest time that one read waits for its first entry, in seconds.
_BLOCK_S: Final = 1.0


class ControllerLink:
    """A trainer's connection to the controller: it sends reports, and receives directives together with rollouts."""

    def __init__(self, stream: Stream, reader: RolloutReader, *, deadline_s: float) -> None:
        self.reader = reader
        self.deadline_s = deadline_s
        self.incarnation = uuid.uuid4().hex[:12]
        self._stream = stream
        self._directive: Directive | None = None
        self._awaited = ""

    @property
    def current(self) -> Directive:
        assert self._directive is not None, "the trainer waits for the answer to TrainerReady before anything else"
        return self._directive

    async def report(self, message: ControlMessage) -> None:
        await self._stream.append(REPORTS, [encode(message)])

    async def wait_for_answer(self, question: Question) -> AsyncIterator[Arrivals]:
        """Send a question every `RESEND_S` until it is answered; yield arrivals. Raises DeadlineError, FencedError."""
        began, sent_at = time.monotonic(), float("-inf")
        deadline, is_told = began + self.deadline_s, False
        self._awaited = question.report_id
        while (now := time.monotonic()) < deadline:
            if now - sent_at >= RESEND_S:
                await self.report(question)
                sent_at = now
            if not is_told and now - began >= RESEND_S:
                is_told = True
                log.info(
                    "the trainer waits for the controller's answer to %s, up to %.0f s", self._awaited, self.deadline_s
                )
            yield await self.read()
            if not self._awaited:
                return
        raise DeadlineError(
            f"the trainer waited {self.deadline_s:.0f} s for the controller to answer {question.report_id}; "
            "is the controller running, with an engine that has joined?"
        )

    async def read(self) -> Arrivals:
        """Return rollouts, after the first directive, and valid directives in a second. Raises FencedError."""
        if self._directive is None:
            arrivals = Arrivals([], await self.reader.read_directives(block_s=_BLOCK_S))
        else:
            arrivals = await self.reader.read(block_s=_BLOCK_S)
        return replace(arrivals, directives=[directive for directive in arrivals.directives if self._apply(directive)])

    async def raise_if_fenced(self) -> None:
        """Raise FencedError if a later trainer has begun; for writes that the stream server does not check."""
        newest, _ = parse_id(await self._stream.last_id(EPOCHS))
        self._check(newest)

    def _apply(self, directive: Directive) -> bool:
        """Make a directive of this epoch current if it answers or is unsolicited; return whether it did."""
        self._check(directive.epoch)
        before, is_answer = self._directive, directive.answers == self._awaited
        answers = ("ready-", "leave-", f"e{directive.epoch}-step-", f"e{directive.epoch}-skip-")
        is_unsolicited = before is not None and not directive.answers.startswith(answers)
        counts = (is_answer or is_unsolicited) and (before is None or directive.epoch == before.epoch)
        if counts:
            self._directive, self._awaited = directive, "" if is_answer else self._awaited
        return counts

    def _check(self, epoch: int) -> None:
        if self._directive is not None and epoch > self._directive.epoch:
            raise FencedError(
                f"epoch {epoch} has taken over from epoch {self._directive.epoch}: another trainer is running; this "
                "one stops"
            )
