"""`Stream`, an append-only log modelled on Redis Streams, and `DeadLetters` for entries that cannot be read.

There are two ways to read, with different guarantees:

- By offset (`read`): the reader keeps its position in its own checkpoint and, after a restart, reads later entries
  again. Rollouts are read this way; deduplication by group id then gives exactly-once processing.
- By consumer group (`claim` / `acknowledge`): consumers share the work, at least once. A dead consumer's entries are
  claimed by others after `reclaim_idle_s`, or immediately by the restarted consumer (`held`). A consumer with a long
  task renews its claim (`renew`). Orders for prompts are read this way; processing an order twice does no harm. The
  stream counts the deliveries of each entry, so that an entry that kills its consumers can be recognized.

Entry ids are `"<number>-<number>"` and increase. A producer that chooses its ids can safely repeat an append after a
lost response: appending the same id, or a lower one, is a no-op. With ids chosen by the server, an append happens at
least once. A killed server loses only its newest commands, of all streams together (with `appendfsync everysec` at most
those of the last two seconds). An acknowledgement is therefore never kept if an append before it was lost.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from pipelinerl.errors import FencedError, RecordError
from pipelinerl.streams.records import encode_message

#: The offset before the first entry.
START = "0-0"


@dataclass(frozen=True, slots=True)
class Entry:
    """One record in a stream, with its id; `deliveries` counts how often its consumer group has got it."""

    stream: str
    entry_id: str
    payload: bytes
    deliveries: int = 1


@dataclass(frozen=True, slots=True)
class Fence:
    """A check that rejects a writer of a `number` below an id in `stream`, which a newer writer has put there."""

    stream: str
    number: int

    def passed(self) -> FencedError:
        """Return the error to raise in the writer that a newer writer has superseded."""
        return FencedError(f"a newer writer than {self.number} has taken over {self.stream}; this one stops")


def parse_id(entry_id: str) -> tuple[int, int]:
    """Parse `"<number>-<number>"` into two numbers, which sort in the order of the ids. Raises `ValueError`."""
    number, dash, sequence = entry_id.partition("-")
    if not (dash and number.isascii() and number.isdigit() and sequence.isascii() and sequence.isdigit()):
        raise ValueError(f"an entry id must be '<number>-<number>', got {entry_id!r}")
    return int(number), int(sequence)


def fresh_number(last_id: str) -> int:
    """Return the first id number for a producer that (re)starts: above `last_id`, and at least the clock in µs.

    The clock matters if the server lost its last second: readers may already have passed ids above `last_id`.
    """
    return max(parse_id(last_id)[0] + 1, time.time_ns() // 1000)


class Stream(Protocol):
    """Named logs on one server. Waits are bounded by `block_s`. Calls to a server that is unreachable, silent or full
    are retried, for minutes if necessary, and then raise `AddressError`, or `PipelineError` if it is full.
    """

    outage: str
    """Why calls are being retried, such as "is unreachable"; empty if the server works."""

    async def append(self, stream: str, payloads: Sequence[bytes], *, first_id: int | None = None) -> int:
        """Append `payloads` in order; return the number of new entries. With `first_id`, payload i gets the id
        `f"{first_id + i}-0"`; payloads whose ids are not above the stream's last are skipped.
        """
        ...

    async def last_id(self, stream: str) -> str:
        """Return the id of the newest entry ever appended, or `START`."""
        ...

    async def read(self, offsets: Mapping[str, str], *, count: int, block_s: float) -> list[Entry]:
        """Return entries after the given offsets, at most `count` per stream; wait up to `block_s` for the first."""
        ...

    async def claim(
        self, stream: str, *, group: str, consumer: str, count: int, block_s: float, reclaim_idle_s: float
    ) -> list[Entry]:
        """Claim up to `count` entries: first those that any consumer held longer than `reclaim_idle_s`, then new ones.
        Wait up to `block_s` for the first. A group that does not exist is created, and begins at the stream's first
        entry.
        """
        ...

    async def held(self, stream: str, *, group: str, consumer: str) -> list[Entry]:
        """Return, and count as delivered again, what this consumer claimed before a restart and did not acknowledge."""
        ...

    async def renew(
        self, stream: str, *, group: str, consumer: str, entry_ids: Sequence[str], deliveries: int | None = None
    ) -> None:
        """Reset the idle time of entries that this consumer is still processing; set their `deliveries` if given."""
        ...

    async def acknowledge(self, stream: str, *, group: str, entry_ids: Sequence[str]) -> None:
        """Mark entries as processed by the consumer group, so that no consumer claims them again."""
        ...

    async def length(self, stream: str) -> int:
        """Return the number of entries kept."""
        ...

    async def room(self, stream: str) -> int:
        """Return the number of entries that fit until the stream is full; appends to a full stream still succeed."""
        ...

    async def trim(self, stream: str, *, before: str, fence: Fence | None = None) -> None:
        """Drop entries with ids below `before`. Raises `FencedError` instead if `fence` shows a newer writer."""
        ...

    async def streams(self, prefix: str) -> list[str]:
        """Return the names of the streams that begin with `prefix`, sorted."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...


DEAD_LETTERS: Final = "dead-letters"
#: Orders that killed the processes that worked on them.
DEADLY_ORDERS: Final = "deadly-orders"


class DeadLetters:
    """Store of unreadable records; `counts` holds the number per stream since this process started."""

    def __init__(self, streams: Stream) -> None:
        self.counts: Final[Counter[str]] = Counter()
        self._streams = streams

    async def bury(self, entry: Entry, error: RecordError) -> None:
        """Store `entry`, which failed to decode with `error`. The entry also stays in its own stream until trimmed."""
        fields = {"stream": entry.stream, "entry_id": entry.entry_id, "reason": str(error), "payload": entry.payload}
        await self._streams.append(DEAD_LETTERS, [encode_message("dead-letter", fields)])
        self.counts[entry.stream] += 1
