"""`Journal`: the controller's memory outside its process, so that it may be killed between any two side effects.

Every decision is written down before its effects are carried out: the input, and the stream ids that the effects will
use. A controller that comes back reads the newest snapshot, decides again on what was journaled since (it is pure, so
the state comes out the same) and carries out the effects of the last decision once more. Those are keyed: prompts and
directives by the ids written here, events by the number of the decision; repeating one is a no-op. An input that was
not journaled had no effect: a report still lies in its stream, an API call was not answered.

It fences, too: of two controllers that write, one finds its number taken, by an entry that is not its own, and stops
before its decision has had any effect.

The numbers of entries are consecutive. When the stream server has lost the tail of its history, they are not, and the
journal is of no use until its next snapshot: `whole` notices, and whoever writes takes a snapshot at once.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Self, final

import msgspec

from pipelinerl.controller.state.inputs import AnyInput, ReportReceived
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.errors import FencedError, RecipeError, UserError
from pipelinerl.messages import LAYOUT, layout_refusal
from pipelinerl.streams.stream import START, Stream, fresh_number, parse_id

#: The stream that holds it.
log = logging.getLogger("pipelinerl")

JOURNAL: Final = "journal"
#: Decisions between two snapshots: what a recovery has to decide again, at most.
_SNAPSHOT_EVERY: Final = 500


class Decision(msgspec.Struct, frozen=True, tag=True):
    """An input that was decided on; its effects take ids from `next_prompt` and `next_directive` on."""

    given: AnyInput
    next_prompt: int
    next_directive: int
    writer: str = ""


class JournalSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The state, the last report that is part of it, when its last decision was taken, and the layout of it all."""

    state: RunState
    reports_offset: str
    writer: str = ""
    now: float = 0.0
    layout: int = LAYOUT


class _Layout(msgspec.Struct, frozen=True):
    """An entry's own name and layout, which are read before anything else of it; the oldest snapshots say none."""

    type: str
    layout: int = 1


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Decision | JournalSnapshot)
_LAYOUTS: Final = msgspec.msgpack.Decoder(_Layout)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """What a journal holds: a state, the decisions since (the last one's effects are to be repeated), where reports are
    read on, and when the last decision was taken."""

    number: int
    state: RunState
    decisions: list[Decision]
    reports_offset: str
    now: float


@final
class Journal:
    """The writer; one at a time. `number` is that of the last entry, `now` the time of the last decision."""

    def __init__(self, stream: Stream, *, number: int) -> None:
        self._stream = stream
        self._writer = uuid.uuid4().hex
        self.number = number
        self._first = number + 1
        self._last_snapshot = number
        self.reports_offset = START
        self.now = 0.0

    @classmethod
    async def begin(cls, stream: Stream) -> Self:
        """A new journal; the `snapshot` that its writer takes first makes any older one void."""
        return cls(stream, number=fresh_number(await stream.last_id(JOURNAL)))

    async def record(self, decision: Decision) -> int:
        """Write a decision down; returns its number. It holds once this returns.

        Raises:
            FencedError: another controller has written instead.
        """
        await self._write(msgspec.structs.replace(decision, writer=self._writer))
        if isinstance(decision.given, ReportReceived):
            self.reports_offset = decision.given.entry_id
        self.now = decision.given.now
        return self.number

    def refuse_unwritable(self, given: AnyInput) -> None:
        """Raise RecipeError for an input that cannot be written down: it must not be decided on either."""
        try:
            _ENCODER.encode(given)
        except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
            raise RecipeError(f"what is asked cannot be recorded: {error}") from None

    @property
    def snapshot_due(self) -> bool:
        """Are there enough decisions since the last snapshot?"""
        return self.number - self._last_snapshot >= _SNAPSHOT_EVERY

    async def snapshot(self, state: RunState) -> None:
        """Write the whole state, all decisions carried out, and drop what came before; raises as `record` does."""
        await self._write(JournalSnapshot(state, self.reports_offset, self._writer, self.now))
        await self._stream.trim(JOURNAL, before=f"{self.number}-0")
        self._first = self._last_snapshot = self.number

    async def _write(self, record: Decision | JournalSnapshot) -> None:
        number, payload = self.number + 1, _ENCODER.encode(record)
        if not await self._stream.append(JOURNAL, [payload], first_id=number):
            # It lies there already: by us, when the answer to a first try was lost.
            found = await self._stream.read({JOURNAL: f"{number - 1}-0"}, count=1, block_s=0)
            if [entry.payload for entry in found] != [payload]:
                raise FencedError("another controller has taken over this run; this one stops")
        self.number = number  # not before: who was fenced finds the other's entry whatever it tries next

    async def whole(self) -> bool:
        """Does the server still hold every entry, and none that is another's?"""
        last = await self._stream.last_id(JOURNAL)
        return last == f"{self.number}-0" and await self._stream.length(JOURNAL) == self.number - self._first + 1

    @staticmethod
    async def is_being_written(stream: Stream, *, for_s: float) -> bool:
        """Does anybody write on in the next `for_s` seconds? A controller whose actors live does: it journals each of
        their heartbeats."""
        last = await stream.last_id(JOURNAL)
        return last != START and bool(await stream.read({JOURNAL: last}, count=1, block_s=for_s))

    @classmethod
    async def recover(cls, stream: Stream) -> tuple[Self, Recovered] | None:
        """The journal that lies in `stream`, to be written on, and what it holds; None when it holds no whole story.

        Raises:
            UserError: a controller of another version has written it.
        """
        entries = await stream.read({JOURNAL: START}, count=10 * _SNAPSHOT_EVERY, block_s=0)
        try:
            _check_layout([entry.payload for entry in entries])
            records = [_DECODER.decode(entry.payload) for entry in entries]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.error("the journal cannot be read (%s): the run goes on from its checkpoint", error)
            return None
        numbers = [parse_id(entry.entry_id)[0] for entry in entries]
        begin = max((i for i, record in enumerate(records) if isinstance(record, JournalSnapshot)), default=None)
        if begin is None or numbers[begin:] != list(range(numbers[begin], numbers[begin] + len(numbers) - begin)):
            return None
        start = records[begin]
        assert isinstance(start, JournalSnapshot)
        decisions = [record for record in records[begin + 1 :] if isinstance(record, Decision)]
        journal = cls(stream, number=numbers[-1])
        journal._first, journal._last_snapshot = numbers[0], numbers[begin]
        heard = [decision.given.entry_id for decision in decisions if isinstance(decision.given, ReportReceived)]
        journal.reports_offset = heard[-1] if heard else start.reports_offset
        journal.now = decisions[-1].given.now if decisions else start.now
        return journal, Recovered(
            number=numbers[-1],
            state=start.state,
            decisions=decisions,
            reports_offset=journal.reports_offset,
            now=journal.now,
        )


def _check_layout(payloads: Sequence[bytes]) -> None:
    """Refuse a journal that holds a snapshot of another layout; its decisions alone say nothing."""
    for record in map(_LAYOUTS.decode, payloads):
        if record.type == JournalSnapshot.__name__ and record.layout != LAYOUT:
            raise UserError(layout_refusal("the controller's journal", record.layout))
