"""`Journal`: the controller's durable memory, so that its process may be killed between any two side effects.

Before the effects of a decision are carried out, its input and the stream ids of its effects are journaled. A restarted
controller loads the newest snapshot, repeats the decisions journaled since then, which are pure, and carries out the
effects of the last decision once more. Effects are idempotent: prompts and directives are appended under the journaled
ids, and events carry the number of the decision. An input that was not journaled had no effect and is not lost: a
report is still in its stream, and the caller of an API call got no answer.

The journal also fences (stops a controller that was replaced): a controller whose next entry number was already used by
another controller stops before its decision has any effect. A successor first appends a `Takeover`, so that the
replaced controller stops at its next poll, even without a decision.

Entry numbers are consecutive. If the stream server loses its newest data, numbers are missing and the journal cannot be
replayed; `whole` detects this, and the writer takes a snapshot immediately.
"""

from __future__ import annotations

import logging
import uuid
from typing import Final, NamedTuple, Self

import msgspec

from pipelinerl.controller.state.inputs_and_effects import AnyInput, ReportReceived
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.errors import FencedError, RecipeError, UserError
from pipelinerl.messages import LAYOUT, layout_refusal
from pipelinerl.streams.stream import START, Stream, fresh_number, parse_id

log = logging.getLogger("pipelinerl")

#: Name of the stream that holds the journal.
JOURNAL: Final = "journal"
#: Number of decisions between two snapshots; a restarted controller repeats at most this many.
_SNAPSHOT_EVERY: Final = 500


class Decision(msgspec.Struct, frozen=True, tag=True):
    """A journaled input, and the first ids that its effects use in the prompt stream and in the directive stream."""

    given: AnyInput
    next_prompt: int
    next_directive: int
    writer: str = ""


class Takeover(msgspec.Struct, frozen=True, tag=True):
    """An entry that only fences: controllers that were started earlier stop, and the state stays as it was."""


class JournalSnapshot(msgspec.Struct, frozen=True, tag=True):
    """The state, the id of the last report that it includes, the time of the last decision, and the layout version."""

    state: RunState
    reports_offset: str
    writer: str = ""
    now: float = 0.0
    layout: int = LAYOUT


class _Layout(msgspec.Struct, frozen=True):
    """Type and layout version of an entry, decoded before its other fields; the oldest snapshots have no version."""

    type: str
    layout: int = 1


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Decision | Takeover | JournalSnapshot)
_LAYOUTS: Final = msgspec.msgpack.Decoder(_Layout)


class Recovered(NamedTuple):
    """A journal, its newest snapshot, and the decisions since, of which the last, `number`, must take effect again."""

    journal: Journal
    state: RunState
    decisions: list[Decision]
    number: int


class Journal:
    """The only writer of a journal. `number` is the number of the last entry, `now` the time of the last decision."""

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
        """Begin a new journal; the first `snapshot` of this writer replaces any older journal."""
        return cls(stream, number=fresh_number(await stream.last_id(JOURNAL)))

    @staticmethod
    async def take_over(stream: Stream) -> None:
        """Stop any other controller that writes the stream's journal; without a journal, do nothing."""
        last = await stream.last_id(JOURNAL)
        while last != START:
            number = parse_id(last)[0] + 1
            if await stream.append(JOURNAL, [_ENCODER.encode(Takeover())], first_id=number):
                return
            last = await stream.last_id(JOURNAL)  # the other controller has written meanwhile

    async def record(self, decision: Decision) -> int:
        """Journal a decision durably; return its number. Raises FencedError if another controller used that number."""
        await self._write(msgspec.structs.replace(decision, writer=self._writer))
        if isinstance(decision.given, ReportReceived):
            self.reports_offset = decision.given.entry_id
        self.now = decision.given.now
        return self.number

    def refuse_unwritable(self, given: AnyInput) -> None:
        """Raise RecipeError if an input cannot be encoded for the journal; called before the decision is made."""
        try:
            _ENCODER.encode(given)
        except (OverflowError, UnicodeEncodeError, TypeError, RecursionError) as error:
            raise RecipeError(f"the request cannot be recorded: {error}") from None

    @property
    def snapshot_due(self) -> bool:
        """True if `_SNAPSHOT_EVERY` decisions were journaled since the last snapshot."""
        return self.number - self._last_snapshot >= _SNAPSHOT_EVERY

    async def snapshot(self, state: RunState) -> None:
        """Write the whole state, once all effects are carried out, and trim older entries. Raises FencedError."""
        await self._write(JournalSnapshot(state, self.reports_offset, self._writer, self.now))
        await self._stream.trim(JOURNAL, before=f"{self.number}-0")
        self._first = self._last_snapshot = self.number

    async def _write(self, record: Decision | JournalSnapshot) -> None:
        number, payload = self.number + 1, _ENCODER.encode(record)
        if not await self._stream.append(JOURNAL, [payload], first_id=number):
            # The number is taken, maybe by this very entry: the server may have stored the entry although its answer
            # was lost.
            stored = await self._stream.read({JOURNAL: f"{number - 1}-0"}, count=1, block_s=0)
            if [entry.payload for entry in stored] != [payload]:
                raise FencedError("another controller has taken over this run; this one stops")
        self.number = number  # set after the check, so a fenced writer fails on every attempt

    async def whole(self) -> bool:
        """Return True if the stream server still has every entry of this journal, and none of another controller."""
        last = await self._stream.last_id(JOURNAL)
        return last == f"{self.number}-0" and await self._stream.length(JOURNAL) == self.number - self._first + 1

    @staticmethod
    async def is_being_written(stream: Stream, *, for_s: float) -> bool:
        """Wait up to `for_s` seconds for a new entry; return True if there is one, since its writer is then alive."""
        last = await stream.last_id(JOURNAL)
        return last != START and bool(await stream.read({JOURNAL: last}, count=1, block_s=for_s))

    @classmethod
    async def recover(cls, stream: Stream) -> Recovered | None:
        """Return the journal with its contents, None if it is incomplete; `UserError` for an unknown layout."""
        entries = await stream.read({JOURNAL: START}, count=10 * _SNAPSHOT_EVERY, block_s=0)
        try:
            for record in map(_LAYOUTS.decode, (entry.payload for entry in entries)):
                if record.type == JournalSnapshot.__name__ and record.layout != LAYOUT:
                    raise UserError(layout_refusal("the controller's journal", record.layout))
            records = [_DECODER.decode(entry.payload) for entry in entries]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            log.error("the journal cannot be read (%s): the run continues from its checkpoint", error)
            return None
        numbers = [parse_id(entry.entry_id)[0] for entry in entries]
        begin = max((i for i, record in enumerate(records) if isinstance(record, JournalSnapshot)), default=None)
        if begin is None or numbers[begin:] != list(range(numbers[begin], numbers[begin] + len(numbers) - begin)):
            return None
        start = records[begin]
        assert isinstance(start, JournalSnapshot)
        found = [(at, record) for at, record in zip(numbers, records, strict=True) if isinstance(record, Decision)]
        decisions = [record for at, record in found if at > numbers[begin]]
        journal = cls(stream, number=numbers[-1])
        journal._first, journal._last_snapshot = numbers[0], numbers[begin]
        report_ids = [decision.given.entry_id for decision in decisions if isinstance(decision.given, ReportReceived)]
        journal.reports_offset = report_ids[-1] if report_ids else start.reports_offset
        journal.now = decisions[-1].given.now if decisions else start.now
        return Recovered(journal, start.state, decisions, found[-1][0] if decisions else numbers[begin])
