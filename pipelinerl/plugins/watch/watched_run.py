"""`WatchedRun`: one run on the page, with the state that was read from its files so far, and a feed of its events.

A thread of the server reads all runs in bounded pieces, so that responses never wait for a long log. Each response
says which share of the files it covers. `Pages` are the runs of one server, with the connections to their controllers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import threading
import time
import tomllib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from fastapi import Depends, Query, Request
from fastapi.responses import Response
from fastapi.sse import format_sse_event
from starlette.exceptions import HTTPException

from pipelinerl.config import recipe as recipes
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event, EventFollower
from pipelinerl.observability.logs import table_without_secrets
from pipelinerl.observability.samples import FOLDER
from pipelinerl.plugins.watch.page.run_view import RunView, whole
from pipelinerl.plugins.watch.page.sample_index import SampleIndex
from pipelinerl.plugins.watch.steering import Steering, state_without_controller

_MOST: Final = 2000
_MOST_BYTES: Final = 16384
#: Delay before a disconnected browser reconnects, in milliseconds.
_RETRY_MS: Final = 1000


@dataclass(frozen=True, slots=True)
class FeedEntry:
    """One event of the feed: its id (`place`), the bytes for each listener, and its `step` if it reports one."""

    place: str
    frame: bytes
    step: int | None = None


class Feed:
    """Recent events of a run, for all its listeners (open pages); bounded even if a listener is slow; thread-safe.

    A listener remembers its place, the id of the last event that it received, and has a bell, an `asyncio.Event`
    that is set when the feed has new events. When a listener reconnects, it sends its place and receives the missed
    events, or a notice that these are no longer kept.
    """

    def __init__(self, run: int) -> None:
        self._run = run
        # A part of each event's id, so that ids from before a restart of the server are recognised as outdated.
        self._life = f"{time.time_ns():x}"
        self._entries: deque[FeedEntry] = deque(maxlen=_MOST)
        # Reentrant, because garbage collection may close a listener while a method holds the lock.
        self._lock = threading.RLock()
        self._number = 0
        self._rung = 0
        self._bells: dict[asyncio.Event, asyncio.AbstractEventLoop] = {}

    @property
    def place(self) -> str:
        """The id of the newest entry; a new listener receives the entries after it."""
        return f"{self._life}-{self._number}"

    def put(self, name: str, fields: Mapping[str, Any], *, step: int | None = None) -> None:
        """Add an entry; listeners wake up and receive it at the next `ring`."""
        data = as_json({**fields, "run": self._run})
        if len(data) > _MOST_BYTES:
            data = as_json({"kind": fields.get("kind"), "time": fields.get("time"), "run": self._run})
        with self._lock:
            self._number += 1
            self._entries.append(FeedEntry(self.place, frame(name, data, self.place), step))

    def ring(self) -> None:
        """Wake all listeners if anything was added since the last call."""
        with self._lock:
            bells = list(self._bells.items()) if self._number > self._rung else []
            self._rung = self._number
            for bell, loop in bells:
                loop.call_soon_threadsafe(bell.set)

    @contextmanager
    def listener(self) -> Iterator[asyncio.Event]:
        bell = asyncio.Event()
        with self._lock:
            self._bells[bell] = asyncio.get_running_loop()
        try:
            yield bell
        finally:
            with self._lock:
                del self._bells[bell]

    def after(self, place: str) -> Sequence[FeedEntry] | None:
        """Return the entries after the one with the id `place`; None if this id is unknown or too old."""
        life, _, number = place.partition("-")
        with self._lock:
            if life != self._life or not number.isdigit() or len(number) > 18:
                return None
            missed = self._number - int(number)
            if not 0 <= missed <= len(self._entries):
                return None
            return list(islice(self._entries, len(self._entries) - missed, None))


def frame(name: str, data: bytes, place: str) -> bytes:
    """Return one server-sent event with the id `place`, which a client sends when it reconnects after this event."""
    return format_sse_event(data_str=data.decode(), event=name, id=place, retry=_RETRY_MS)


def as_json(value: Any) -> bytes:
    """Encode plain values and structs as JSON: NaN becomes null, and integers of any size are kept."""
    try:
        return msgspec.json.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return json.dumps(msgspec.to_builtins(value, str_keys=True)).encode()


log = logging.getLogger("pipelinerl")

_PIECE_BYTES: Final = 2**20


class WatchedRun:
    """A run in a directory, and its controller; hold `lock` while reading. With `read_only`, nothing can be changed."""

    def __init__(self, number: int, run_dir: Path, *, read_only: bool = False) -> None:
        self.number = number
        self.run_dir = run_dir
        self.steering = Steering(run_dir, read_only)
        self.view = RunView()
        self.lock = threading.RLock()
        self.samples = SampleIndex(run_dir)
        self.feed = Feed(number)
        self.loaded: set[str] = set()
        self.state = "starting"
        self.trouble = ""
        """The reason why the files cannot be read."""
        self._log = EventFollower(run_dir / "events.jsonl")

    @property
    def name(self) -> str:
        """The run's name by its event log, or its directory's name until the log contains the run's name."""
        return str(self.view.started.get("run") or self.run_dir.resolve().name)[:200]

    @property
    def loading(self) -> dict[str, float]:
        return {"events": round(self._log.share, 4), "samples": round(self.samples.share, 4)}

    def recipe(self) -> dict[str, Any]:
        """Return the recipe without passwords; an empty table if it is missing or unreadable."""
        try:
            return _plain_table(tomllib.loads((self.run_dir / "recipe.toml").read_text()))
        except (OSError, ValueError):
            return {}

    def settings_made(self) -> dict[str, Any]:
        """Return the recipe's non-default settings; the whole recipe if this version of pipelinerl cannot read it."""
        try:
            return _plain_table(recipes.to_table(recipes.load_run(self.run_dir), without_defaults=True))
        except UserError:
            return self.recipe()

    def advance(self) -> bool:
        """Read another piece of the files and wake listeners; return True if there is more."""
        with self.lock:
            try:
                more = self._read_events()
                more = self._read_samples() or more
            except OSError as error:
                if not self.trouble:
                    log.warning("%s cannot be read: %s", self.run_dir, error.strerror)
                self.trouble = f"{self.run_dir} cannot be read: {error.strerror}"
                return False
            finally:
                self.feed.ring()
            self.trouble = ""
            return more

    def note_state(self, *, answers: bool) -> None:
        """Set the run's state (`live` if its controller answers, else derived from its log); notify listeners."""
        with self.lock:
            state = "live" if answers else state_without_controller(self.view)
            if state != self.state:
                self.state = state
                self.feed.put("state", {"state": state})
                self.feed.ring()

    def _read_events(self) -> bool:
        events = self._log.new(most_bytes=_PIECE_BYTES)
        if self._log.is_replaced:
            self.view = RunView()
            self.feed.put("rewound", {"to": 0})
        live = "events" in self.loaded
        for event in events:
            try:
                self._take(event, live=live)
            except Exception:  # the log is untrusted: one malformed event must not break the page
                log.exception("%s has an event that cannot be processed; skipping it", self.run_dir)
        if not live and not self._log.is_behind:
            self.loaded.add("events")
            self.feed.put("loaded", {"what": "events"})
        return self._log.is_behind

    def _read_samples(self) -> bool:
        count = self.samples.read()
        if count and "samples" in self.loaded:
            self.feed.put("samples", {"step": self.view.step, "count": count})
        if "samples" not in self.loaded and not self.samples.unread_bytes:
            self.loaded.add("samples")
            self.feed.put("loaded", {"what": "samples"})
        return self.samples.unread_bytes > 0 and (count > 0 or "samples" not in self.loaded)

    def _take(self, event: Event, *, live: bool) -> None:
        rewound = self.view.take(event)
        if not live:
            return
        if rewound:
            self.feed.put("rewound", {"to": event["step"] - 1})
        step = whole(event, "step")
        if event["kind"] == "step" and step is not None:
            plain = {name: each for name, each in event.items() if each is None or isinstance(each, int | float | str)}
            self.feed.put("step", plain, step=step)  # without nested metrics, such as those by domain
        else:
            self.feed.put("event", event)


def watched_runs(directories: Sequence[Path], *, read_only: bool = False) -> list[WatchedRun]:
    """Return the runs to watch, numbered in the order of their directories; raise `UserError` if one holds no run."""
    for directory in directories:
        there = ("events.jsonl", "recipe.toml", FOLDER)
        if not any((directory / name).exists() for name in there):
            raise UserError(f"{directory} is not a run: it has none of {', '.join(there)}; name the run's directory")
    return [WatchedRun(number, directory, read_only=read_only) for number, directory in enumerate(directories)]


def _plain_table(table: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = _plain(table_without_secrets(table))
    return plain


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return value if isinstance(value, int | float) else str(value)


#: Seconds between two polls of the controllers, while a page listens.
STATE_S: Final = 2.0

#: Type of a query parameter: the number of the requested run.
RunNumber = Annotated[int, Query(alias="run", ge=0, le=10_000)]


def _looks_only(request: Request) -> bool:
    return bool(getattr(request.state, "looks_only", False))


#: Type of a parameter that is True if the request comes from a read-only link.
LooksOnly = Annotated[bool, Depends(_looks_only)]
#: Type of a query parameter: a name by which results are filtered.
Name = Annotated[str | None, Query(max_length=500)]
#: Type of a query parameter: a step or a model version.
StepNumber = Annotated[int | None, Query(ge=0, le=2**53)]


class Pages:
    """The runs that one server shows."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self.all = tuple(runs)
        self._noted_at = -math.inf

    def of(self, number: int) -> WatchedRun:
        """Return the run with this number; raise HTTPException 404 if there is none."""
        if number >= len(self.all):
            raise HTTPException(404, f"runs are 0 to {len(self.all) - 1}, got {number}")
        return self.all[number]

    @property
    def states_are_old(self) -> bool:
        """True if the controllers have not been polled for `STATE_S` seconds, so the runs' states may be outdated."""
        return time.monotonic() - self._noted_at >= STATE_S

    def note_states(self) -> None:
        self._noted_at = time.monotonic()
        for run in self.all:
            run.note_state(answers=not run.view.state and run.steering.status(max_age_s=STATE_S) is not None)


def answer(value: Any) -> Response:
    """Return a response with plain values as JSON, NaN as null."""
    return Response(as_json(value), media_type="application/json")
