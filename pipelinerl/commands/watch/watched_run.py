"""`WatchedRun`: one run on the page, with the state read from its files so far and the feed of its listeners.

The thread of `Follower` reads all runs in bounded pieces, so that responses never wait for a long log. Responses cover
what has been read so far and state which share of the files that is.
"""

from __future__ import annotations

import logging
import threading
import time
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from pipelinerl.commands.watch.feed import Feed, step_figures
from pipelinerl.config import recipe as recipes
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.page.event_tail import EventTail
from pipelinerl.observability.page.run_view import RunView, whole
from pipelinerl.observability.page.sample_index import SampleIndex
from pipelinerl.observability.samples.reading import FOLDER

log = logging.getLogger("pipelinerl")

#: Seconds between two reads of the files, and so the least time between two notifications of pages.
_POLL_S: Final = 0.5
#: Seconds of pause after each piece of a long log, so that other threads can run.
_BREATH_S: Final = 0.001
#: Seconds without an event after which the controller is assumed dead; a live controller writes events more often.
_SILENT_S: Final = 15.0


@final
@dataclass(slots=True)
class WatchedRun:
    """State of the run in a directory; callers must hold `lock` while they read it."""

    number: int
    run_dir: Path
    view: RunView = field(default_factory=RunView)
    lock: threading.RLock = field(default_factory=threading.RLock)
    samples: SampleIndex = field(init=False)
    feed: Feed = field(init=False)
    loaded: set[str] = field(default_factory=set)
    state: str = "starting"
    trouble: str = ""
    """The reason why the files cannot be read."""
    changes: int = 0
    """Increases with every change of `view` and `state`."""
    _tail: EventTail = field(init=False)

    def __post_init__(self) -> None:
        self.samples = SampleIndex(self.run_dir)
        self.feed = Feed(self.number)
        self._tail = EventTail(self.run_dir / "events.jsonl")

    @property
    def name(self) -> str:
        """The run's name; until the log contains it, the name of the directory."""
        return str(self.view.started.get("run") or self.run_dir.resolve().name)[:200]

    @property
    def loading(self) -> dict[str, float]:
        """Shares of the event log and of the samples that have been read, 0 to 1."""
        return {"events": round(self._tail.share, 4), "samples": round(self.samples.share, 4)}

    def recipe(self) -> dict[str, Any]:
        """Return the recipe without passwords; an empty table if it is missing or unreadable."""
        try:
            table = tomllib.loads((self.run_dir / "recipe.toml").read_text())
        except (OSError, ValueError):
            return {}
        plain: dict[str, Any] = _plain(table)
        return plain

    def settings_made(self) -> dict[str, Any]:
        """Return the recipe's non-default settings; the whole recipe if this version of pipelinerl cannot read it."""
        try:
            plain: dict[str, Any] = _plain(recipes.to_table(recipes.load_run(self.run_dir), without_defaults=True))
        except UserError:
            return self.recipe()
        return plain

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
        """Derive the run's state from the log and from whether its controller `answers`; notify listeners of a
        change.
        """
        with self.lock:
            state = self.view.state or ("live" if answers else self._silent_state())
            if state != self.state:
                self.state = state
                self.changes += 1
                self.feed.put("state", {"state": state})
                self.feed.ring()

    def _silent_state(self) -> str:
        newest = self.view.newest.get("time")
        recent = isinstance(newest, int | float) and time.time() - newest < _SILENT_S
        return "starting" if recent or not self.view.newest else "crashed"

    def _read_events(self) -> bool:
        piece = self._tail.read()
        self.changes += piece.is_new_file or bool(piece.events)
        if piece.is_new_file:
            self.view = RunView()
            self.feed.put("rewound", {"to": 0})
        live = "events" in self.loaded
        for event in piece.events:
            try:
                self._take(event, live=live)
            except Exception:  # untrusted input: one malformed event must not break the whole page
                log.exception("%s has an event that cannot be processed; skipping it", self.run_dir)
        if not live and not self._tail.is_behind:
            self.loaded.add("events")
            self.changes += 1
            self.feed.put("loaded", {"what": "events"})
        return self._tail.is_behind

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
            self.feed.put("step", step_figures(event), step=step)
        else:
            self.feed.put("event", event)


def watched_runs(directories: Sequence[Path]) -> list[WatchedRun]:
    """Return the runs to watch, numbered in the order of their directories.

    Raises:
        UserError: a directory holds no run.
    """
    for directory in directories:
        there = ("events.jsonl", "recipe.toml", FOLDER)
        if not any((directory / name).exists() for name in there):
            raise UserError(f"{directory} is not a run: it has none of {', '.join(there)}; name the run's directory")
    return [WatchedRun(number, directory) for number, directory in enumerate(directories)]


@final
class Follower:
    """Thread that reads all runs until it is closed."""

    def __init__(self, runs: Sequence[WatchedRun]) -> None:
        self._runs = runs
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread."""
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        while not self._closed.is_set():
            more = [run.advance() for run in self._runs]
            self._closed.wait(_BREATH_S if any(more) else _POLL_S)


def _plain(value: Any) -> Any:
    """Return values that JSON can represent, without users and passwords in addresses."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return str(value)
    return without_secrets(value) if isinstance(value, str) else value if isinstance(value, int | float) else str(value)
