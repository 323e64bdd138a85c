"""`MemoryStream`, the `Stream` protocol within one process, for tests and for runs without a server.

It passes the tests of `RedisStream`, but its data is lost when the process ends. All callers must share one event loop.
`Stream` documents the methods.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pipelinerl.streams.stream import START, Entry, Fence, parse_id

_Id = tuple[int, int]


@dataclass(slots=True)
class _Pending:
    consumer: str
    since: float
    deliveries: int


@dataclass(slots=True)
class _Group:
    delivered: _Id = (0, 0)
    pending: dict[_Id, _Pending] = field(default_factory=dict)


@dataclass(slots=True)
class _Log:
    ids: list[_Id] = field(default_factory=list)
    payloads: list[bytes] = field(default_factory=list)
    last: _Id = (0, 0)
    groups: dict[str, _Group] = field(default_factory=dict)

    def append(self, entry_id: _Id, payload: bytes) -> bool:
        """Append the entry if its id is above the last id; return whether it was appended."""
        if entry_id <= self.last:
            return False
        self.ids.append(entry_id)
        self.payloads.append(payload)
        self.last = entry_id
        return True

    def next_id(self) -> _Id:
        """Return the id that a server would choose: clock in milliseconds, but above the last id."""
        return max((time.time_ns() // 1_000_000, 0), (self.last[0], self.last[1] + 1))


class MemoryStream:
    """Logs in the memory of this process. A stream with `max_length` entries counts as full; see `Stream.room`."""

    def __init__(self, *, max_length: int = 100_000) -> None:
        self.max_length: Final = max_length
        self.outage = ""
        self._logs: dict[str, _Log] = {}
        self._appended = asyncio.Event()

    async def append(self, stream: str, payloads: Sequence[bytes], *, first_id: int | None = None) -> int:
        if first_id is not None and first_id < 1:
            raise ValueError(f"first_id must be at least 1, got {first_id}")
        if not payloads:
            return 0
        log = self._logs.setdefault(stream, _Log())
        added = 0
        for number, payload in enumerate(payloads):
            entry_id = log.next_id() if first_id is None else (first_id + number, 0)
            added += log.append(entry_id, bytes(payload))
        if added:
            self._appended.set()
            self._appended = asyncio.Event()
        return added

    async def last_id(self, stream: str) -> str:
        return _text(self._logs[stream].last) if stream in self._logs else START

    async def read(self, offsets: Mapping[str, str], *, count: int, block_s: float) -> list[Entry]:
        after = {name: parse_id(offset) for name, offset in offsets.items()}

        def newer() -> list[Entry]:
            return [entry for name, offset in after.items() for entry in self._after(name, offset, count)]

        return await self._first(newer, block_s=block_s, look_again_s=block_s) if offsets else []

    async def claim(
        self, stream: str, *, group: str, consumer: str, count: int, block_s: float, reclaim_idle_s: float
    ) -> list[Entry]:
        log = self._logs.setdefault(stream, _Log())
        shared = log.groups.setdefault(group, _Group())

        def mine() -> list[Entry]:
            latest = time.monotonic() - reclaim_idle_s
            idle = sorted(held for held, pending in shared.pending.items() if pending.since <= latest)[:count]
            entries = self._kept(stream, idle)
            for trimmed in set(idle) - {parse_id(entry.entry_id) for entry in entries}:
                del shared.pending[trimmed]
            entries = entries or self._after(stream, shared.delivered, count)
            for entry in entries:
                shared.delivered = max(shared.delivered, parse_id(entry.entry_id))
            return _deliver(shared.pending, consumer, entries)

        return await self._first(mine, block_s=block_s, look_again_s=max(reclaim_idle_s, 0.01))

    async def held(self, stream: str, *, group: str, consumer: str) -> list[Entry]:
        pending = self._pending(stream, group)
        mine = sorted(entry_id for entry_id, held in pending.items() if held.consumer == consumer)
        return _deliver(pending, consumer, self._kept(stream, mine))

    async def renew(
        self, stream: str, *, group: str, consumer: str, entry_ids: Sequence[str], deliveries: int | None = None
    ) -> None:
        pending = self._pending(stream, group)
        for entry_id in map(parse_id, entry_ids):
            if (held := pending.get(entry_id)) is not None:
                count = held.deliveries if deliveries is None else deliveries
                pending[entry_id] = _Pending(consumer, time.monotonic(), count)

    async def acknowledge(self, stream: str, *, group: str, entry_ids: Sequence[str]) -> None:
        pending = self._pending(stream, group)
        for entry_id in map(parse_id, entry_ids):
            pending.pop(entry_id, None)

    async def length(self, stream: str) -> int:
        return len(self._logs[stream].ids) if stream in self._logs else 0

    async def room(self, stream: str) -> int:
        return max(0, self.max_length - await self.length(stream))

    async def trim(self, stream: str, *, before: str, fence: Fence | None = None) -> None:
        bound = parse_id(before)
        if fence is not None and fence.stream in self._logs and self._logs[fence.stream].last[0] > fence.number:
            raise fence.passed()
        if stream in self._logs:
            log = self._logs[stream]
            dropped = bisect_left(log.ids, bound)
            del log.ids[:dropped], log.payloads[:dropped]

    async def streams(self, prefix: str) -> list[str]:
        return sorted(name for name in self._logs if name.startswith(prefix))

    async def close(self) -> None:
        self._logs.clear()

    def _pending(self, stream: str, group: str) -> dict[_Id, _Pending]:
        return self._logs.get(stream, _Log()).groups.get(group, _Group()).pending

    async def _first(self, look: Callable[[], list[Entry]], *, block_s: float, look_again_s: float) -> list[Entry]:
        """Poll `look` after each append and every `look_again_s`, for at most `block_s`; return the entries found."""
        deadline = time.monotonic() + block_s
        while not (entries := look()) and (left := deadline - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(left, look_again_s)):
                    await self._appended.wait()
            except TimeoutError:
                continue
        return entries

    def _after(self, stream: str, offset: _Id, count: int) -> list[Entry]:
        log = self._logs.get(stream)
        if log is None:
            return []
        start = bisect_right(log.ids, offset)
        kept = zip(log.ids[start : start + count], log.payloads[start : start + count], strict=True)
        return [Entry(stream, _text(entry_id), payload) for entry_id, payload in kept]

    def _kept(self, stream: str, ids: Sequence[_Id]) -> list[Entry]:
        log = self._logs.get(stream, _Log())
        places = [(entry_id, bisect_left(log.ids, entry_id)) for entry_id in ids]
        return [
            Entry(stream, _text(entry_id), log.payloads[place])
            for entry_id, place in places
            if place < len(log.ids) and log.ids[place] == entry_id
        ]


def _deliver(pending: dict[_Id, _Pending], consumer: str, entries: Sequence[Entry]) -> list[Entry]:
    """Record one more delivery of the entries, to `consumer`; return them with their new counts."""
    delivered = []
    for entry in entries:
        entry_id = parse_id(entry.entry_id)
        before = pending[entry_id].deliveries if entry_id in pending else 0
        pending[entry_id] = _Pending(consumer, time.monotonic(), before + 1)
        delivered.append(replace(entry, deliveries=before + 1))
    return delivered


def _text(entry_id: _Id) -> str:
    return f"{entry_id[0]}-{entry_id[1]}"
