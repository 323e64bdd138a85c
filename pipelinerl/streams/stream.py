"""`Stream`: an append-only log by name, after Redis Streams. `redis_stream` and `memory_stream` satisfy it.

Two ways to read, for two promises:
- by offset (`read`): the reader keeps its own position, inside its checkpoint. Rollouts are read so: what was read but
  not yet part of a checkpoint is simply read again (exactly once, together with duplicate detection by group id).
- by consumer group (`claim` / `acknowledge`): work is shared between consumers, and what a dead one held is claimed
  again after `reclaim_idle_s`, or at once by its next life (`held`); one that works for long says so (`renew`). Prompt
  orders are read so (at least once; orders are idempotent).

Entry ids are `"<number>-<number>"` and grow. A producer that chooses its own id may append again after a lost answer:
the second append of the same id, or a lower one, is a no-op. Ids that the server chooses carry no such promise: such an
append is made at least once. What a server that was killed forgets (with `appendfsync everysec` at most the last two
seconds) is always the end of its history, over all streams: never an append without the acknowledgement that followed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.errors import FencedError

#: The offset before the first entry.
START = "0-0"


@dataclass(frozen=True, slots=True)
class Entry:
    """One appended record."""

    stream: str
    entry_id: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Fence:
    """Shuts a writer out: passed once an id with a number above `number` has been appended to `stream`."""

    stream: str
    number: int

    def passed(self) -> FencedError:
        """What a writer is told that comes too late."""
        return FencedError(
            f"{self.stream} has gone beyond {self.number}, which was this writer's: another has taken over; this one "
            "stops"
        )


def parse_id(entry_id: str) -> tuple[int, int]:
    """An entry id as numbers, which order as ids do.

    Raises:
        ValueError: not of the form `"<number>-<number>"`.
    """
    number, dash, sequence = entry_id.partition("-")
    if not (dash and number.isascii() and number.isdigit() and sequence.isascii() and sequence.isdigit()):
        raise ValueError(f"an entry id must be '<number>-<number>', got {entry_id!r}")
    return int(number), int(sequence)


def fresh_number(last_id: str) -> int:
    """Where a producer that (re)starts begins to number: above the stream's last id, and not below the clock in µs.

    The clock matters when the server lost its last second: its `last_id` is then below ids that a reader may already
    have passed, and an entry appended under such an id would never be read.
    """
    return max(parse_id(last_id)[0] + 1, time.time_ns() // 1000)


class Stream(Protocol):
    """Named logs on one server. Waits are bounded by `block_s`; an unreachable server raises `AddressError`.

    A server that has no room is waited for, minutes if need be; then it is a `PipelineError` with the server's words.
    """

    async def append(self, stream: str, payloads: Sequence[bytes], *, first_id: int | None = None) -> int:
        """Append in order, in one round trip. Returns how many were new.

        With `first_id`, payload i gets the id `f"{first_id + i}-0"`; an id not above the stream's last is skipped.
        """
        ...

    async def last_id(self, stream: str) -> str:
        """Id of the newest entry ever appended, or `START`."""
        ...

    async def read(self, offsets: Mapping[str, str], *, count: int, block_s: float) -> list[Entry]:
        """Entries after the given offsets, at most `count` for each stream, waiting up to `block_s` for the first."""
        ...

    async def claim(
        self, stream: str, *, group: str, consumer: str, count: int, block_s: float, reclaim_idle_s: float
    ) -> list[Entry]:
        """Entries for this consumer: first those that any consumer held longer than `reclaim_idle_s`, then new ones.

        At most `count`; waits up to `block_s` for the first. The group is created at the stream's beginning on demand.
        """
        ...

    async def held(self, stream: str, *, group: str, consumer: str) -> list[Entry]:
        """What an earlier life of this consumer claimed and never acknowledged, oldest first."""
        ...

    async def renew(self, stream: str, *, group: str, consumer: str, entry_ids: Sequence[str]) -> None:
        """This consumer still works on these entries: they are not idle."""
        ...

    async def acknowledge(self, stream: str, *, group: str, entry_ids: Sequence[str]) -> None:
        """The group is done with these entries."""
        ...

    async def length(self, stream: str) -> int:
        """Entries kept."""
        ...

    async def room(self, stream: str) -> int:
        """How many more entries may be appended before the stream is full; 0 says that the producer should wait.

        The bound is the producer's to respect: an append beyond it is kept, since nothing is ever dropped silently.
        """
        ...

    async def trim(self, stream: str, *, before: str, fence: Fence | None = None) -> None:
        """Drop entries with ids below `before`; behind a fence, if it has not been passed, in one step with looking.

        Raises:
            FencedError: it has been passed; nothing was dropped.
        """
        ...

    async def streams(self, prefix: str) -> list[str]:
        """Names of the streams that begin with `prefix`, sorted."""
        ...

    async def close(self) -> None:
        """Release connections."""
        ...
