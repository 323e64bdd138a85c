"""`Feed`: recent events of a run for all its listeners, bounded however slow a listener is.

A listener keeps its place: the number of the last event that it received. It also has a bell: an asyncio event that is
set when there are more events. A reconnecting listener sends its place and receives what it missed, or a notice that it
is too far behind. All bells ring at the same moment, so that pages send the same requests at the same time and share
the cached responses.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, final

import msgspec
from fastapi.sse import format_sse_event

from pipelinerl.observability.events import Event

_MOST: Final = 2000
#: A listener that is further behind receives one notice to refetch the steps, instead of every step.
_FAR_BEHIND: Final = 200
_MOST_BYTES: Final = 16384
#: Delay before a disconnected browser reconnects, in milliseconds.
_RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One event of the feed: its place and the bytes that each listener receives; `step` if the event is a step."""

    place: str
    frame: bytes
    step: int | None = None


@final
class Feed:
    """Queue with one writer and many listeners, on any threads."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._life = f"{time.time_ns():x}"  # unique, so that places from before a restart of the server are detected
        self._entries: deque[FeedEntry] = deque(maxlen=_MOST)
        self._lock = threading.RLock()  # reentrant: garbage collection may close a listener inside any call
        self._number = 0
        self._rung = 0
        self._bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def place(self) -> str:
        """The place at which a new listener starts."""
        return f"{self._life}-{self._number}"

    def put(self, name: str, fields: Mapping[str, Any], *, step: int | None = None) -> None:
        """Add an entry; listeners receive it after the next `ring`."""
        data = as_json({**fields, "run": self._run})
        if len(data) > _MOST_BYTES:
            data = as_json({"kind": fields.get("kind"), "time": fields.get("time"), "run": self._run})
        with self._lock:
            self._number += 1
            self._entries.append(FeedEntry(self.place, _frame(name, data, self.place), step))

    def ring(self) -> None:
        """Wake all listeners if anything was added since the last call."""
        with self._lock:
            bells = list(self._bells.items()) if self._number > self._rung else []
            self._rung = self._number
            for bell, loop in bells:
                loop.call_soon_threadsafe(bell.set)

    @contextmanager
    def listener(self) -> Iterator[asyncio.Event]:
        """Yield a bell that is set in the running event loop whenever there are new entries."""
        bell = asyncio.Event()
        with self._lock:
            self._bells[bell] = asyncio.get_running_loop()
        try:
            yield bell
        finally:
            with self._lock:
                del self._bells[bell]

    def after(self, place: str) -> Sequence[FeedEntry] | None:
        """Return the entries after a listener's place; None if the place is unknown or its entries are no longer
        kept.
        """
        life, _, number = place.partition("-")
        with self._lock:
            if life != self._life or not number.isdigit() or len(number) > 18:
                return None
            missed = self._number - int(number)
            if not 0 <= missed <= len(self._entries):
                return None
            return list(islice(self._entries, len(self._entries) - missed, None))


def frame(name: str, data: Mapping[str, Any], place: str) -> bytes:
    """Return one server-sent event; a client that loses its connection after this event will reconnect with `place`."""
    return _frame(name, as_json(data), place)


def _frame(name: str, data: bytes, place: str) -> bytes:
    return format_sse_event(data_str=data.decode(), event=name, id=place, retry=_RETRY_MS)


def as_json(value: Any) -> bytes:
    """Encode plain values and structs as JSON: NaN becomes null, and integers of any size are kept."""
    try:
        return msgspec.json.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode()


def step_figures(event: Event) -> dict[str, Any]:
    """Return a step's plain figures; nested figures, such as those by domain, are left out."""
    return {name: value for name, value in event.items() if isinstance(value, int | float | str) or value is None}


def summarised(entries: Sequence[FeedEntry]) -> tuple[int, int] | None:
    """Return (step before the first, last step) if the entries should be replaced by one notice; None if they are
    few.
    """
    steps = [entry.step for entry in entries if entry.step is not None]
    return (min(steps) - 1, max(steps)) if len(entries) > _FAR_BEHIND and steps else None
