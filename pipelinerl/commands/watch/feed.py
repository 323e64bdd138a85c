"""`Feed`: what has just happened in a run, for all who listen; bounded, however slow one of them is.

A listener holds a place in it, and a bell that rings when there is more. Whoever comes back says where they were; what
they have missed is told while it is held, and else they are told that they are behind. The bells ring at one moment for
all: pages then ask the same at the same time, of which much is worked out once.
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
#: Whoever is further behind fetches steps anew rather than being told each.
_FAR_BEHIND: Final = 200
_MOST_BYTES: Final = 16384
#: What a browser that was cut off waits before it comes back, in milliseconds.
_RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One thing that happened: its place, and the bytes that tell it to each listener; `step` where it is one."""

    place: str
    frame: bytes
    step: int | None = None


@final
class Feed:
    """One writer, many readers, on any threads."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._life = f"{time.time_ns():x}"  # no other server's
        self._entries: deque[FeedEntry] = deque(maxlen=_MOST)
        self._lock = threading.RLock()  # a listener that is collected as garbage lets go within whatever runs
        self._number = 0
        self._rung = 0
        self._bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def place(self) -> str:
        """Where somebody who listens from now on stands."""
        return f"{self._life}-{self._number}"

    def put(self, name: str, told: Mapping[str, Any], *, step: int | None = None) -> None:
        """Have it told to everybody when `ring` is called next."""
        data = as_json({**told, "run": self._run})
        if len(data) > _MOST_BYTES:
            data = as_json({"kind": told.get("kind"), "time": told.get("time"), "run": self._run})
        with self._lock:
            self._number += 1
            self._entries.append(FeedEntry(self.place, _frame(name, data, self.place), step))

    def ring(self) -> None:
        """Wake those who listen, if anything was put since the last time."""
        with self._lock:
            bells = list(self._bells.items()) if self._number > self._rung else []
            self._rung = self._number
            for bell, loop in bells:
                loop.call_soon_threadsafe(bell.set)

    @contextmanager
    def listener(self) -> Iterator[asyncio.Event]:
        """A bell, which is set in the running loop whenever there is more."""
        bell = asyncio.Event()
        with self._lock:
            self._bells[bell] = asyncio.get_running_loop()
        try:
            yield bell
        finally:
            with self._lock:
                del self._bells[bell]

    def after(self, place: str) -> Sequence[FeedEntry] | None:
        """What came after that place; None where it is not known, or too long ago."""
        life, _, number = place.partition("-")
        with self._lock:
            if life != self._life or not number.isdigit() or len(number) > 18:
                return None
            missed = self._number - int(number)
            if not 0 <= missed <= len(self._entries):
                return None
            return list(islice(self._entries, len(self._entries) - missed, None))


def frame(name: str, told: Mapping[str, Any], place: str) -> bytes:
    """One server-sent event; who is cut off after it comes back with `place`."""
    return _frame(name, as_json(told), place)


def _frame(name: str, data: bytes, place: str) -> bytes:
    return format_sse_event(data_str=data.decode(), event=name, id=place, retry=_RETRY_MS)


def as_json(value: Any) -> bytes:
    """Plain values and structs as JSON, in which NaN is null; also numbers that are too long for most readers."""
    try:
        return msgspec.json.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode()


def step_told(event: Event) -> dict[str, Any]:
    """Of a step its figures alone, without those by domain."""
    return {name: value for name, value in event.items() if isinstance(value, int | float | str) or value is None}


def summarised(entries: Sequence[FeedEntry]) -> tuple[int, int] | None:
    """Of so many that they are better fetched: the step before the first that is in there, and the last."""
    steps = [entry.step for entry in entries if entry.step is not None]
    return (min(steps) - 1, max(steps)) if len(entries) > _FAR_BEHIND and steps else None
