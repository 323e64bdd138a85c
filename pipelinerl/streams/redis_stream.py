"""`RedisStream`, the `Stream` protocol on a Redis or Valkey server.

    append        EVAL of XADDs       stops at the first entry that the server rejects, so the log never has a gap
    read          XREAD BLOCK         several streams at once
    claim         XAUTOCLAIM, then XREADGROUP BLOCK
    held          XREADGROUP 0        entries that this consumer has claimed and not acknowledged
    deliveries    XPENDING            after XAUTOCLAIM and XREADGROUP 0, which increment the server's count
    renew XCLAIM JUSTID   acknowledge XACK   length XLEN   trim XTRIM MINID (in EVAL)   last_id XINFO STREAM

A server that has not answered yet gets `timeout_s`; then an `AddressError` names it. Later, commands are retried with
exponential backoff for at most `outage_s` while it is unreachable, silent or without disk space or memory, or its state
admits no commands (`_STATES`): it loads its data, is a replica during a failover, or lacks a part of its cluster. All
commands are safe to repeat: an append with chosen ids skips entries that it already appended. A stream `s` is the key
`<namespace>:s`; an entry has the single field `p`.

| waits for | at most | unblocked by |
|---|---|---|
| an entry (`read`, `claim`) | `block_s` | a producer |
| the server's first answer | `timeout_s` | the server |
| the end of an outage | `outage_s` | the server, its restart or promotion, freed disk space, or a higher `maxmemory` |
"""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Final, Self

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    ConnectionError as RedisConnectionError,
    MasterDownError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError as RedisTimeoutError,
    TryAgainError,
)

from pipelinerl.errors import AddressError, PipelineError
from pipelinerl.observability.logs import without_secrets
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.streams.stream import START, Entry, Fence, Stream, parse_id

log = logging.getLogger("pipelinerl")

# Appends run as a script, because a script can stop at the first payload that is rejected (out of memory, say). A
# pipeline or MULTI would still append the payloads after it. A retry would then skip the rejected payload, because its
# id is no longer above the last one.
_APPEND: Final = """
local first, added = tonumber(ARGV[1]), 0
for i = 2, #ARGV do
  local id = '*'
  if first > 0 then id = string.format('%.0f-0', first + i - 2) end
  local answer = redis.pcall('XADD', KEYS[1], id, 'p', ARGV[i])
  if type(answer) ~= 'table' or not answer.err then
    added = added + 1
  elseif not string.find(answer.err, 'equal or smaller', 1, true) then
    return answer
  end
end
return added
"""

_FENCED_TRIM: Final = """
local newest = redis.call('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
if newest and tonumber(string.match(newest[1], '%d+')) > tonumber(ARGV[2]) then return -1 end
return redis.call('XTRIM', KEYS[1], 'MINID', '=', ARGV[1])
"""

#: Large appends are split, because a script call blocks the server, and larger scripts exceed the server's CPU caches.
_MAX_APPEND_BYTES: Final = 1 << 20
#: Bound on ids and counts: Lua's numbers are doubles, so above it neighbouring ids would become equal.
_MAX_NUMBER: Final = 1 << 53
#: Codes of errors that the server's state causes. redis-py removes the code from a message that has a class of its own.
_STATES: Final[Mapping[str, type[RedisError] | None]] = {
    "LOADING": BusyLoadingError,  # it reads its data after a restart
    "READONLY": ReadOnlyError,  # it is a replica, for example during a failover
    "MASTERDOWN": MasterDownError,
    "CLUSTERDOWN": ClusterDownError,
    "TRYAGAIN": TryAgainError,
    "NOREPLICAS": None,  # fewer replicas than it needs for writes
    "UNBLOCKED": None,  # it became a replica during a blocking command
    "BUSY": None,  # a script of another client runs
}
#: An error's code at the message's beginning, or after a hyphen in errors of scripts.
_STATE: Final = re.compile(rf"(?:^|-)({'|'.join(_STATES)})\b")
_RAW_ANSWERS: Final = ("XREAD", "XREADGROUP", "XAUTOCLAIM", "XCLAIM", "XPENDING", "SCAN")

#: A function that builds a command, given the milliseconds for which the command may still block.
_Command = Callable[[int], tuple[Any, ...]]


class RedisStream:
    """Named logs on a Redis server. `connect` binds the object to the running event loop; `Stream` documents the rest.

    Args:
        url: `redis://[user:password@]host:port[/db]` (also `rediss://`, `unix://`).
        namespace: prefix of all keys, so that several runs can share a server.
        timeout_s: longest wait for the server's first answer, before an `AddressError`. Later, a server that does not
            answer for as long is asked again.
        outage_s: longest outage of a server that has answered, before an `AddressError`, or a `PipelineError` if it
            rejects commands. The default equals `training.deadline_s`.
        max_length: number of entries from which a stream counts as full; see `Stream.room`.
    """

    def __init__(
        self, url: str, *, namespace: str, timeout_s: float = 10.0, outage_s: float = 300.0, max_length: int = 100_000
    ) -> None:
        """Create the client. Raises `AddressError` if the address is malformed."""
        self.max_length: Final = max_length
        self.outage = ""
        self._address = without_secrets(url)
        self._prefix = f"{namespace}:"
        self._timeout_s = timeout_s
        self._outage_s = outage_s
        self._has_answered = False
        self._walked: dict[tuple[str, str], float] = {}
        try:
            self._client = Redis.from_url(
                url, protocol=2, retry=Retry(NoBackoff(), 0), socket_timeout=None, socket_connect_timeout=timeout_s / 4
            )
        except ValueError as error:
            sentence = f"a stream server's address must be redis://host:port, got {self._address}: {error}"
            raise AddressError(sentence) from None
        for command in _RAW_ANSWERS:  # redis-py's conversion to dictionaries costs more than the command itself
            self._client.set_response_callback(command, lambda response, **_: response)

    async def connect(self) -> Self:
        """Check that the server answers (else `AddressError`), admits commands, and evicts no entries."""
        try:
            await self._call("PING")
            try:
                policy = str((await self._call("INFO", "memory")).get("maxmemory_policy", ""))
            except _RefusedError:  # the user may not read the server's settings
                return self
            if policy.startswith("allkeys"):  # policies `volatile-…` evict only keys that expire
                raise AddressError(
                    f"the stream server at {self._address} has the maxmemory-policy {policy}, which deletes rollouts "
                    "when its memory is full; set maxmemory-policy to noeviction"
                )
        except PipelineError:
            await self.close()
            raise
        return self

    async def append(self, stream: str, payloads: Sequence[bytes], *, first_id: int | None = None) -> int:
        """Append as `Stream.append` does, but in one round trip per MiB."""
        if first_id is not None and not 1 <= first_id < _MAX_NUMBER - len(payloads):
            raise ValueError(f"first_id must lie in [1, 2^53 - number of payloads), got {first_id}")
        added = 0
        # Split payloads into ranges of at most `_MAX_APPEND_BYTES`; a larger payload is a range of its own.
        bounds, size = [0], 0
        for number, payload in enumerate(payloads):
            if size and size + len(payload) > _MAX_APPEND_BYTES:
                bounds.append(number)
                size = 0
            size += len(payload)
        for start, stop in list(pairwise([*bounds, len(payloads)])) if payloads else []:
            first = 0 if first_id is None else first_id + start
            added += await self._call("EVAL", _APPEND, 1, self._prefix + stream, first, *payloads[start:stop])
        return added

    async def last_id(self, stream: str) -> str:
        try:
            facts = await self._call("XINFO", "STREAM", self._prefix + stream)
        except _RefusedError as error:
            if "no such key" in str(error):
                return START
            raise
        return str(dict(zip(facts[::2], facts[1::2], strict=True))[b"last-generated-id"].decode())

    async def read(self, offsets: Mapping[str, str], *, count: int, block_s: float) -> list[Entry]:
        for offset in offsets.values():
            parse_id(offset)
        if not offsets:
            return []
        where = [*(self._prefix + name for name in offsets), *offsets.values()]

        def command(block_ms: int) -> tuple[Any, ...]:
            return ("XREAD", "COUNT", count, *_block(block_ms), "STREAMS", *where)

        return self._entries(await self._blocking(command, block_s))

    async def claim(
        self, stream: str, *, group: str, consumer: str, count: int, block_s: float, reclaim_idle_s: float
    ) -> list[Entry]:
        key, deadline = self._prefix + stream, time.monotonic() + block_s

        def command(block_ms: int) -> tuple[Any, ...]:
            return ("XREADGROUP", "GROUP", group, consumer, "COUNT", count, *_block(block_ms), "STREAMS", key, ">")

        while True:
            try:
                entries = await self._reclaim(stream, group, consumer, count, reclaim_idle_s)
                if not entries:
                    # Block no longer than it takes an entry to become idle, so that `_reclaim` finds it in time.
                    left = min(deadline - time.monotonic(), max(reclaim_idle_s, 0.01))
                    entries = self._entries(await self._blocking(command, max(left, 0.0)))
            except _RefusedError as error:
                if not str(error).startswith("NOGROUP"):
                    raise
                try:
                    await self._call("XGROUP", "CREATE", key, group, "0", "MKSTREAM")
                except _RefusedError as refused:
                    if not str(refused).startswith("BUSYGROUP"):  # BUSYGROUP: another consumer has created the group
                        raise
                continue
            if entries or time.monotonic() >= deadline:
                return entries

    async def held(self, stream: str, *, group: str, consumer: str) -> list[Entry]:
        key = self._prefix + stream
        try:
            entries = self._entries(await self._call("XREADGROUP", "GROUP", group, consumer, "STREAMS", key, START))
            return await self._counted(key, group, consumer, entries)
        except _RefusedError as error:
            if not str(error).startswith("NOGROUP"):
                raise
            return []

    async def renew(
        self, stream: str, *, group: str, consumer: str, entry_ids: Sequence[str], deliveries: int | None = None
    ) -> None:
        if entry_ids:
            count = () if deliveries is None else ("RETRYCOUNT", deliveries)
            await self._call("XCLAIM", self._prefix + stream, group, consumer, 0, *entry_ids, *count, "JUSTID")

    async def acknowledge(self, stream: str, *, group: str, entry_ids: Sequence[str]) -> None:
        if entry_ids:
            await self._call("XACK", self._prefix + stream, group, *entry_ids)

    async def length(self, stream: str) -> int:
        return int(await self._call("XLEN", self._prefix + stream))

    async def room(self, stream: str) -> int:
        return max(0, self.max_length - await self.length(stream))

    async def trim(self, stream: str, *, before: str, fence: Fence | None = None) -> None:
        parse_id(before)
        if fence is None:
            await self._call("XTRIM", self._prefix + stream, "MINID", "=", before)
            return
        keys = (self._prefix + stream, self._prefix + fence.stream)
        if await self._call("EVAL", _FENCED_TRIM, 2, *keys, before, fence.number) < 0:
            raise fence.passed()

    async def streams(self, prefix: str) -> list[str]:
        pattern = "".join(f"\\{letter}" if letter in "*?[]\\^" else letter for letter in self._prefix + prefix) + "*"
        names: set[str] = set()
        cursor: int | bytes = 0
        while True:
            cursor, keys = await self._call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000, "TYPE", "stream")
            names.update(key.decode()[len(self._prefix) :] for key in keys)
            if int(cursor) == 0:
                return sorted(names)

    async def close(self) -> None:
        await self._client.aclose()

    async def _reclaim(self, stream: str, group: str, consumer: str, count: int, idle_s: float) -> list[Entry]:
        """Scan the group's pending entries for idle ones; after an empty scan, skip scans for `idle_s` / 4."""
        key, now = (stream, group), time.monotonic()
        if now < self._walked.get(key, -math.inf) + idle_s / 4:
            return []
        cursor = START
        while True:
            where = (self._prefix + stream, group, consumer, round(idle_s * 1000), cursor)
            answer = await self._call("XAUTOCLAIM", *where, "COUNT", count)
            entries = list(self._of(stream, answer[1]))
            cursor = answer[0].decode()
            if entries:
                return await self._counted(self._prefix + stream, group, consumer, entries)
            if cursor == START:
                self._walked[key] = now
                return []

    async def _counted(self, key: str, group: str, consumer: str, entries: list[Entry]) -> list[Entry]:
        """Return the entries, which are in order and claimed by this consumer, with the server's delivery counts."""
        if not entries:
            return entries
        first, last = entries[0].entry_id, entries[-1].entry_id
        pending = await self._call("XPENDING", key, group, first, last, _MAX_NUMBER, consumer)
        deliveries = {entry_id.decode(): count for entry_id, _, _, count in pending}
        return [replace(entry, deliveries=deliveries.get(entry.entry_id, 1)) for entry in entries]

    def _entries(self, answer: list[Any] | None) -> list[Entry]:
        """Return the entries of an XREAD or XREADGROUP answer, [[key, [[id, [field, value]], …]], …] or None."""
        return [entry for key, found in answer or () for entry in self._of(key.decode()[len(self._prefix) :], found)]

    @staticmethod
    def _of(stream: str, found: list[Any]) -> Iterator[Entry]:
        # Servers before version 7 return nil for a pending entry that was trimmed.
        return (Entry(stream, item[0].decode(), item[1][1]) for item in found if item is not None and item[1])

    async def _call(self, *command: Any) -> Any:
        return await self._blocking(lambda _: command, 0.0)

    async def _blocking(self, command: _Command, block_s: float) -> Any:
        """Run a command until the server answers; block for `block_s` in total, across reconnects. Raises
        `AddressError` and `_RefusedError` after an outage as long as the limits, and `_RefusedError` for an error.
        """
        unblocked = time.monotonic() + block_s
        out_since: float | None = None
        failure: PipelineError
        pause = 0.005
        while True:
            began = time.monotonic()
            left = max(0.0, unblocked - began)
            try:
                async with asyncio.timeout(left + self._timeout_s):
                    answer = await self._client.execute_command(*command(round(left * 1000)))
                self._has_answered = True
                if out_since is not None:
                    self._note("")
                return answer
            except (AuthenticationError, AuthorizationError) as error:
                raise AddressError(
                    f"the stream server at {self._address} rejected the user or password ({error}); "
                    "put the correct ones into the address"
                ) from error
            except (ResponseError, BusyLoadingError) as error:
                failure, outage = _RefusedError(str(error), self._address), _outage_of(error)
                if not outage:
                    raise failure from error
                self._has_answered = True
            except TimeoutError:
                out_since = time.monotonic() - self._timeout_s if out_since is None else out_since
                outage = "does not answer"
                failure = AddressError(
                    f"the stream server at {self._address} accepted a connection but did not answer for "
                    f"{self._limit_s:g} s; check if it is stopped or swapping"
                )
            except (RedisConnectionError, RedisTimeoutError, OSError) as error:
                # An attempt that took longer than the connect timeout had a connection, so the server has become
                # unreachable only now.
                if time.monotonic() - began > self._timeout_s / 2:
                    out_since, pause = None, 0.005
                outage = f"is unreachable ({error})"
                failure = AddressError(
                    f"cannot reach the stream server at {self._address} for {self._limit_s:g} s ({error}); "
                    "start it, or correct the address"
                )
            now = time.monotonic()
            out_since = now if out_since is None else out_since
            left_s = out_since + self._limit_s - now
            if left_s <= 0:
                raise failure
            self._note(outage)
            await asyncio.sleep(min(pause, left_s))
            pause = min(2 * pause, 0.5)

    @property
    def _limit_s(self) -> float:
        """The longest outage that is tolerated now."""
        return self._outage_s if self._has_answered else self._timeout_s

    def _note(self, outage: str) -> None:
        """Set `outage`, to "" when it has ended; log its beginning and its end."""
        if outage and not self.outage and self._has_answered:
            log.warning(
                "the stream server at %s %s; commands are retried for %g s", self._address, outage, self._outage_s
            )
        elif self.outage and not outage:
            log.warning("the stream server at %s works again", self._address)
        self.outage = outage


class _RefusedError(PipelineError):
    """An error answer of the server; the message begins with the server's own words."""

    def __init__(self, answer: str, address: str) -> None:
        super().__init__(f"{answer} (answer of the stream server at {address})")


def _outage_of(error: RedisError) -> str:
    """Return which outage an error answer reports, for messages; "" if a repeated command would be rejected, too."""
    if isinstance(error, OutOfMemoryError) or str(error).startswith("MISCONF"):  # memory or disk
        return f"is full ({error})"
    found = _STATE.search(str(error))
    states = [code for code, kind in _STATES.items() if kind is not None and isinstance(error, kind)]
    code = states[0] if states else found[1] if found else ""
    return f"rejects commands in its state {code} ({error})" if code else ""


def _block(block_ms: int) -> tuple[Any, ...]:
    """Return the BLOCK arguments; none for zero, because BLOCK 0 waits forever."""
    return ("BLOCK", block_ms) if block_ms > 0 else ()


# --- opening by address -----------------------------------------------------------------------------------------------


async def open_stream(url: str, *, namespace: str, timeout_s: float = 10.0, max_length: int = 100_000) -> Stream:
    """Open `memory://`, a new and empty server in this process, or `redis://…`, with the arguments of `RedisStream`.

    Raises `AddressError` if the address is malformed, no server answers, or the password is rejected.
    """
    scheme = url.partition("://")[0]
    if scheme == "memory":
        return MemoryStream(max_length=max_length)
    if scheme in ("redis", "rediss", "unix"):
        return await RedisStream(url, namespace=namespace, timeout_s=timeout_s, max_length=max_length).connect()
    raise AddressError(
        f"a stream server's address must be memory:// or redis://host:port, got {without_secrets(url)!r}"
    )
