"""`Tracker`: interface of experiment trackers, with three implementations; `TrackerFeed` sends them a run's events.

A tracker is opened with the bookmark that its last `flush` returned, possibly in another process, and continues that
run. Rows logged after that flush may be logged again; a tracker should avoid duplicates if it can.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
from filelock import FileLock, Timeout

from pipelinerl.observability.events import ENDS, EventFollower
from pipelinerl.plugins.trackers.metric_names import HistoryRewind, MetricReader, ReaderState
from pipelinerl.plugins.trackers.section import TrackioSection, WandbSection

#: State from which a tracker can continue: plain JSON, which the feed stores together with its position in the log.
Bookmark = dict[str, Any]


class Tracker(Protocol):
    """One run in an experiment tracker. Methods may block or raise OSError; after an error, open the run again."""

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Log the metrics of a step, named as in `metric_names`, with their `time` (Unix seconds)."""
        ...

    def rewind(self, step: int) -> None:
        """Discard the rows of `step` and later steps; the run resumed from a checkpoint and repeats these steps."""
        ...

    def flush(self) -> Bookmark:
        """Make logged rows durable, and return a bookmark from which a later process can continue."""
        ...

    def close(self) -> None:
        """Free files and threads; closing twice is harmless."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackedRun:
    """The run's name, its directory, and its recipe without secrets, as given to a tracker."""

    name: str
    directory: Path
    recipe: Mapping[str, Any]


#: A function that opens a tracker: at a bookmark, or a new one if there is no bookmark.
OpenTracker = Callable[[Bookmark | None], Tracker]


def open_tensorboard(_: None, run: TrackedRun, bookmark: Bookmark | None) -> Tracker:
    """Open the run's event files."""
    return TensorBoardTracker(run.directory / "tensorboard", bookmark)


FOLDER: Final = "trackers"


class FeedPosition(msgspec.Struct, frozen=True, kw_only=True):
    """The position in the log up to which a tracker has received events. `over` is True if the run ended there."""

    offset: int = 0
    reader: ReaderState = msgspec.field(default_factory=ReaderState)
    bookmark: dict[str, Any] | None = None
    over: bool = False


class TrackerFeed:
    """Sends a run's events to one tracker, and can continue after its process was killed. Use it from one thread.

        <run>/trackers/<name>.json   position: the offset in events.jsonl, the reader's state, the tracker's bookmark
        <run>/trackers/<name>.lock   held while a process feeds this tracker

    Each piece of the log is sent to the tracker and flushed; then the new position is written atomically. If the
    process is killed before that write, its successor starts at the previous position, and the tracker uses its
    bookmark to discard what was logged after that position.

    Raises BlockingIOError if another process feeds this tracker, OSError if tracker or position cannot be written.
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
        self.is_over = events[-1]["kind"] in ENDS
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
        try:
            if self._tracker is not None:
                self._tracker.close()
        finally:
            self._tracker = None
            self._lock.release()


def _read(place: Path) -> FeedPosition:
    """Read the position. Raises ValueError if the file is damaged: starting over would log all rows twice."""
    try:
        return msgspec.json.decode(place.read_bytes(), type=FeedPosition)
    except FileNotFoundError:
        return FeedPosition()
    except msgspec.DecodeError as error:
        raise ValueError(f"{place} must hold the tracker's position: {error}; remove it to start over") from None


# --- TensorBoard, trackio, Weights & Biases ---------------------------------------------------------------------------
#
# A tracker imports its package only when it is opened: tensorboardX, for example, imports torch if installed.

_VERSION: Final = "brain.Event:2"
_PATTERN: Final = "events.out.tfevents.*.pipelinerl"


class TensorBoardTracker:
    """Writes TensorBoard event files into one directory, each metric exactly once; other files there stay unchanged.

    Each process writes a new file. The bookmark records all files and their lengths; bytes beyond them, from a process
    that was killed before it saved the bookmark, are cut off and logged again. `rewind` removes repeated steps from all
    files; the next file starts with `SessionLog.START`, which makes an open TensorBoard discard these steps, too. The
    package's `SummaryWriter` is not used: it writes on its own thread, where the exception of a full disk is lost.
    """

    def __init__(self, directory: Path, bookmark: Bookmark | None = None) -> None:
        """Open the directory, and discard what was written after the `bookmark`, a saved position. Raises OSError."""
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        known: dict[str, int] = dict((bookmark or {}).get("files", {}))
        for path in _files(directory):
            if path.name not in known:
                path.unlink()
            elif path.stat().st_size > known[path.name]:
                os.truncate(path, known[path.name])
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.record_writer import RecordWriter

        self._event, self._session, self._summary, self._open = Event, SessionLog, Summary, RecordWriter
        self._number = max((int(path.name.split(".")[3]) for path in _files(directory)), default=0)
        self._writer: Any = None
        self._restart_at: int | None = None

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(self._event(wall_time=time, step=step, summary=self._summary(value=values)), time)

    def rewind(self, step: int) -> None:
        """Remove this step and later ones from all files, each atomically. Raises OSError."""
        self._end_file()
        for path in _files(self._directory):
            draft = path.with_name(f"{path.name}.draft")  # TensorBoard ignores files with this suffix
            with path.open("rb") as old, draft.open("wb") as new:
                for record, content in _records(old.read()):
                    event = self._event.FromString(content)
                    if not event.HasField("summary") or event.step < step:
                        new.write(record)
            draft.replace(path)
        self._restart_at = step

    def flush(self) -> Bookmark:
        if self._writer is not None:
            self._writer.flush()
        return {"files": {path.name: path.stat().st_size for path in _files(self._directory)}}

    def close(self) -> None:
        """Close the file; metrics that were not flushed may be lost, and will be logged again."""
        self._end_file()

    def _write(self, event: Any, time: float) -> None:
        if self._writer is None:
            self._number += 1
            self._writer = self._open(str(self._directory / f"events.out.tfevents.{self._number:010d}.pipelinerl"))
            self._put(self._event(wall_time=time, file_version=_VERSION))
            if self._restart_at is not None:
                mark = self._session(status=self._session.START)
                self._put(self._event(wall_time=time, step=self._restart_at, session_log=mark))
                self._restart_at = None
        self._put(event)

    def _put(self, event: Any) -> None:
        self._writer.write(event.SerializeToString())

    def _end_file(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.close()


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob(_PATTERN))


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield each complete TFRecord and its event: length (u64), checksum (u32), event, checksum (u32)."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        if end > len(data):
            return
        yield data[at:end], data[at + 12 : end - 4]
        at = end


class TrackioTracker:
    """One run of trackio: the newest run of this name if there is a bookmark, otherwise a new run.

    trackio cannot delete rows. After a resume from a checkpoint, the first rows of repeated steps and evaluations stay,
    and new ones are not logged. After a kill, the rows of the last half second may be logged twice. The bookmark holds
    the newest logged step, separately for training steps and each evaluation set.
    """

    def __init__(self, section: TrackioSection, run: TrackedRun, bookmark: Bookmark | None) -> None:
        self._newest: dict[str, int] = dict((bookmark or {}).get("newest", {}))
        resume = "never" if bookmark is None else "allow"
        options = dict(section) | {"name": run.name, "config": dict(run.recipe), "resume": resume}
        self._run = import_module("trackio").init(**options)

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Log the metrics of a step as one row; trackio ignores `time` and uses the current time."""
        first = next(iter(figures))
        sort = first.rpartition("/")[0] if first.startswith("eval/") else ""
        if step > self._newest.get(sort, -1):
            self._run.log(dict(figures), step=step)
            self._newest[sort] = step

    def rewind(self, step: int) -> None:
        """Do nothing: trackio cannot remove rows."""

    def flush(self) -> Bookmark:
        """Return the bookmark without waiting: trackio sends rows on its own thread."""
        return {"newest": dict(self._newest)}

    def close(self) -> None:
        self._run.finish()


_EVALUATIONS: Final = "eval/"
_WANDB_VERSION: Final = "eval/version"


class WandbTracker:
    """One run of W&B, online or offline. The bookmark holds the run's id and the newest logged step.

    - W&B accepts steps in rising order only. After a resume from a checkpoint it keeps the first rows of repeated
      steps. Rows that are logged again after a kill are dropped, too.
    - An evaluation ends after later steps have been logged, so its metrics go into the newest step's row. Charts of
      evaluations have the evaluated version, `eval/version`, as x axis.
    - The package sends and writes in a process of its own, in pieces of 32 KiB. If that process is killed, a piece is
      lost. The package retries an unreachable server; logging does not wait for the server.
    """

    def __init__(self, section: WandbSection, run: TrackedRun, bookmark: Bookmark | None) -> None:
        self._run = import_module("wandb").init(
            **dict(section),
            name=run.name,
            id=(bookmark or {}).get("id"),
            resume="allow",
            dir=str(run.directory),
            config=dict(run.recipe),
        )
        self._newest = int((bookmark or {}).get("step", -1))
        self._run.define_metric(_WANDB_VERSION, hidden=True)
        self._run.define_metric(f"{_EVALUATIONS}*", step_metric=_WANDB_VERSION)

    def log(self, step: int, figures: Mapping[str, float], *, time: float) -> None:
        """Log the metrics of a step as one row. W&B has one row per step and rejects steps before the newest one."""
        if any(name.startswith(_EVALUATIONS) for name in figures):
            self._run.log({**figures, _WANDB_VERSION: float(step)}, step=max(step, self._newest))
        elif step > self._newest:
            self._run.log({**figures, "time": time}, step=step)
            self._newest = step

    def rewind(self, step: int) -> None:
        """Do nothing: W&B keeps the first of two rows of a step."""

    def flush(self) -> Bookmark:
        return {"id": self._run.id, "step": self._newest}

    def close(self) -> None:
        self._run.finish()
