"""`Tracker`, the interface of trackers, and `TrackerFeed`, which sends a run's events to one exactly once.

A tracker is opened with the bookmark of its last `flush`, possibly in another process, and continues the same tracker
run. Rows logged after that flush may be logged again; a tracker should avoid duplicates if it can.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Protocol, final

import msgspec
from filelock import FileLock, Timeout

from pipelinerl.observability.events import EventFollower
from pipelinerl.observability.trackers.metric_names import HistoryRewind, MetricReader, ReaderState

#: State from which a tracker can continue: plain JSON, stored by the feed with its position.
Bookmark = dict[str, Any]


class Tracker(Protocol):
    """A run in a tracker. Every method may block, or raise OSError; the feed then reopens the tracker later."""

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Log figures of a step, named as in `metric_names`, at `time` (Unix seconds)."""
        ...

    def rewind(self, step: int) -> None:
        """Discard this step and later ones; the run repeats them."""
        ...

    def flush(self) -> Bookmark:
        """Make logged rows durable, and return a bookmark from which a later process can continue."""
        ...

    def close(self) -> None:
        """Free files and threads; closing twice is harmless."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """Information on the run for a tracker: its name, its directory, and its recipe without secrets."""

    name: str
    directory: Path
    recipe: Mapping[str, Any]


#: Opens a tracker, new or at a bookmark.
OpenTracker = Callable[[Bookmark | None], Tracker]

#: The package that each tracker needs and how to install it, by the tracker's key in `[trackers]`.
PACKAGES: Final = {
    "tensorboard": ("tensorboardX", "pip install 'pipelinerl[track]'"),
    "wandb": ("wandb", "pip install wandb"),
    "trackio": ("trackio", "pip install trackio"),
}


def missing_package(tracker: str) -> str:
    """Return an error message if the tracker's package is not installed, else an empty string."""
    package, install = PACKAGES[tracker]
    return "" if find_spec(package) is not None else f"trackers.{tracker} needs the package {package}: {install}"


FOLDER: Final = "trackers"
_LAST: Final = ("run_finished", "run_suspended", "run_failed")


class FeedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position up to which a tracker was fed. `over` is True if the last event was an end of the run."""

    offset: int = 0
    reader: ReaderState = msgspec.field(default_factory=ReaderState)
    bookmark: dict[str, Any] | None = None
    over: bool = False


@final
class TrackerFeed:
    """Sends a run's events to one tracker, even if the feeding process is killed.

        <run>/trackers/<name>.json   position: the offset in events.jsonl, the reader's state, the tracker's bookmark
        <run>/trackers/<name>.lock   held while a process feeds this tracker

    A piece of the log is logged and flushed; then the position is written atomically. A process killed in between
    starts again at the previous position. The tracker's bookmark lets it discard what was logged after that.

    Feed of one tracker while it is open; use it from one thread.

    Raises:
        BlockingIOError: another process feeds the tracker.
        OSError: the tracker or the position cannot be written; open another feed later.
    """

    def __init__(self, run_dir: Path, name: str, open_tracker: OpenTracker) -> None:
        """Open the tracker at the recorded position; `name` distinguishes the trackers of a run."""
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        self._place = folder / f"{name}.json"
        self._lock = FileLock(folder / f"{name}.lock", timeout=0, mode=0o600, fallback_to_soft=False)
        try:
            self._lock.acquire()
        except Timeout:
            raise BlockingIOError(f"another process feeds {name} from {run_dir}") from None
        self._tracker: Tracker | None = None
        try:
            position = _read(self._place)
            self._follower = EventFollower(run_dir / "events.jsonl", offset=position.offset)
            self._reader = MetricReader(position.reader)
            self.is_over = position.over
            self._tracker = open_tracker(position.bookmark)
        except BaseException:
            self.close()
            raise

    def advance(self) -> bool:
        """Send the next piece of the log to the tracker; return False if there is nothing new."""
        events = self._follower.new()
        if not events or self._tracker is None:
            return False
        for event in events:
            for row in self._reader.read(event):
                if isinstance(row, HistoryRewind):
                    self._tracker.rewind(row.step)
                elif row.figures:
                    self._tracker.log(row.step, row.figures, time=row.time)
        self.is_over = events[-1]["kind"] in _LAST
        position = FeedPosition(
            offset=self._follower.offset,
            reader=self._reader.state,
            bookmark=self._tracker.flush(),
            over=self.is_over,
        )
        draft = self._place.with_name(f"{self._place.name}.new")
        draft.write_bytes(msgspec.json.encode(position))
        draft.replace(self._place)
        return True

    def close(self) -> None:
        """Close the tracker and release the lock."""
        try:
            if self._tracker is not None:
                self._tracker.close()
        finally:
            self._tracker = None
            self._lock.release()


def _read(place: Path) -> FeedPosition:
    """Read the position. Raises ValueError if the file is damaged: starting over would log everything twice."""
    try:
        return msgspec.json.decode(place.read_bytes(), type=FeedPosition)
    except FileNotFoundError:
        return FeedPosition()
    except msgspec.DecodeError as error:
        raise ValueError(f"{place} must hold the tracker's position: {error}; remove it to start over") from None
