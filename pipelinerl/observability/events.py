"""The event log of a run: append-only, one JSON object per line.

    {"time": 1760000000.123, "kind": "step", "elapsed_s": 12.5, "step": 3, "reward": 0.41, ...}

Guarantees:

- Each record is written with one `write`, so readers never see two records mixed.
- A power failure may lose the records of the last seconds; if only the process is killed, all records survive.
- A writer killed in the middle of a line leaves a torn tail. Readers ignore it, and the next writer cuts it off.
- Written records never change. Only one process writes to a log: it holds a lock on the file, which ends with it.
- Readers skip a line that is not a record, and log it.
- While the disk is full, records are kept in memory and written in order once there is space; `write` does not block.
  If the disk filled up in the middle of a record, the rest of this record is written first.

| waits for | at most | who unblocks it |
|---|---|---|
| disk space (`close`) | `timeout_s` | the user, by freeing space |
| the lock (opening) | `lock_s` | the process that holds it, by ending |

Kinds that the controller writes, each with `elapsed_s`: run_started, step, step_skipped, publish, evaluation, engines,
knobs, checkpoint, checkpoint_delayed, orders_lost, evaluation_began, evaluation_restarted, engines_hired,
engines_scaled, engines_would_scale, engine_joined, engine_verified, engine_canary_failed, engine_suspect, engine_slow,
engine_back, engine_draining, engine_lost, parameter_server_lost, parameter_server_back, group_failed, group_outdated,
group_handed_over, report_refused, stalled, rewind, rewind_failed, alarm, alarm_cleared, controller_returned,
trainer_ready, trainer_left, run_failing, run_failed, run_suspending, run_suspended, run_finished. In an event that
follows from a decision of the controller, the field `decision` is the number of that decision in the controller's
journal.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Self

import msgspec

log = logging.getLogger("pipelinerl")

_DECODER: Final = msgspec.json.Decoder(dict)
_RECENT_BYTES: Final = 65536
_PIECE_BYTES: Final = 2**16
#: Maximum length of a line in bytes; a longer line cannot be an event.
_MOST_BYTES: Final = 2**25
#: Error numbers of a full disk and of an exhausted quota.
_NO_ROOM: Final = (errno.ENOSPC, errno.EDQUOT)
#: Error numbers of a file system without locks.
_NO_LOCKS: Final = (errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
_PAUSE_S: Final = 1.0
_LOOK_S: Final = 0.1
#: Longest description of an event, in characters.
_MOST_TEXT: Final = 500

#: One record: `time` (Unix seconds), `kind` and the fields of its kind.
Event = dict[str, Any]
#: Kinds of the events that end a run, or this launch of it.
ENDS: Final = ("run_finished", "run_suspended", "run_failed")


def kind_of(event: Event) -> str:
    """Return the kind to display: `engine_left` if an `engine_lost` was planned, otherwise the event's own kind."""
    kind = str(event["kind"])
    return "engine_left" if kind == "engine_lost" and event.get("planned") is True else kind


def number(fields: Mapping[str, Any], name: str) -> float | None:
    """Return the field `name` as a float; None unless it is a finite number."""
    value = fields.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -1e300 < value < 1e300:
        return None
    return float(value)


def amount(fields: Mapping[str, Any], name: str) -> float:
    """Return the field `name` as a float; 0 unless it is a finite number."""
    return number(fields, name) or 0.0


class EventLog:
    """Writer of an event log. Opening it creates missing files and directories and cuts off an incomplete last line."""

    def __init__(
        self, path: Path, *, clock: Callable[[], float] = time.time, timeout_s: float = 300.0, lock_s: float = 0.0
    ) -> None:
        """Open the log for writing. If the disk stays full for `timeout_s`, `write` and `close` raise OSError.

        Raises BlockingIOError if another process still writes to the log after `lock_s`.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        self._clock = clock
        self._timeout_s = timeout_s
        self.path = path
        self._unwritten = b""
        self._full_since: float | None = None
        self.no_room = ""
        """The reason why records cannot be written now; empty if they can."""
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            self._lock(time.monotonic() + lock_s)
            os.ftruncate(self._file, _whole_length(self._file))
        except BaseException:
            os.close(self._file)
            raise

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record; non-finite numbers become null. Raises OSError, for a full disk only after `timeout_s`."""
        record = {"time": round(self._clock(), 3), "kind": kind, **fields}
        self._unwritten += (json.dumps(_finite(record), separators=(",", ":"), allow_nan=False) + "\n").encode()
        self._put()

    def count_recent(self, **fields: Any) -> int:
        """Count the records in the last 64 KiB that have the given field values, so a writer can detect repetition."""
        end = os.fstat(self._file).st_size
        start = max(0, end - _RECENT_BYTES)
        written = os.pread(self._file, end - start, start)
        lines = (written + self._unwritten).split(b"\n")[1 if start else 0 : -1]
        return sum(fields.items() <= event.items() for event in _records(lines, self.path))

    def close(self) -> None:
        """Force all records to disk and close; idempotent. Retries for a while if the disk is full. Raises OSError."""
        if self._file >= 0:
            file = self._file
            try:
                self._put()
                while self._unwritten:
                    time.sleep(_PAUSE_S)
                    self._put()
                os.fsync(file)
            finally:
                self._file = -1
                os.close(file)

    def _lock(self, until: float) -> None:
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise BlockingIOError(f"{self.path} is being written by another process") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
                return
            else:
                return
            time.sleep(_LOOK_S)

    def _put(self) -> None:
        """Write as many pending bytes as fit on the disk, in order, beginning with the rest of an incomplete line."""
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._file, self._unwritten) :]
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            now, self.no_room = time.monotonic(), f"{self.path}: {error.strerror}"
            if self._full_since is None:
                self._full_since = now
                log.warning("%s; events are buffered until there is space", self.no_room)
            if now - self._full_since >= self._timeout_s:
                raise
        else:
            self._full_since, self.no_room = None, ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """Return every record in order, even while the log is being written. Raises FileNotFoundError if there is no log.

    An incomplete last line is ignored; any other line that is not a record is skipped and logged.
    """
    path.stat()
    return list(EventFollower(path).all())


class EventFollower:
    """Incremental reader of a log that grows or is replaced, in bounded pieces; it never writes, locks or blocks.

    An incomplete line is left for the next call. If the file was replaced, or is shorter than what was read, reading
    starts again at its beginning.
    """

    def __init__(self, path: Path, *, offset: int = 0) -> None:
        """Start reading at byte `offset`: 0, or the attribute `offset` of an earlier follower."""
        self._path = path
        self._file: tuple[int, int] | None = None
        self.offset = offset
        self.size = offset
        self.is_replaced = False
        """True if the records of the last call are the first of a file that replaced another file."""

    @property
    def is_behind(self) -> bool:
        """True if the last call did not reach the log's end; an incomplete last line does not count."""
        return self.offset < self.size

    @property
    def share(self) -> float:
        """Share of the log that has been read, 0 to 1."""
        return self.offset / self.size if self.size else 1.0

    def new(self, *, most_bytes: int = _PIECE_BYTES) -> list[Event]:
        """Return about `most_bytes` of records, at least one if any; lines that are not records are skipped."""
        piece, self.is_replaced = most_bytes, False
        try:
            status = self._path.stat()
            file = (status.st_dev, status.st_ino)
            if self._file is not None and (file != self._file or status.st_size < self.offset):
                self.offset, self.is_replaced = 0, True
            self._file, self.size = file, status.st_size
            while self.is_behind:
                with self._path.open("rb") as log_file:
                    log_file.seek(self.offset)
                    data = log_file.read(piece)
                whole = data.rfind(b"\n") + 1
                if not whole and piece < _MOST_BYTES:
                    if len(data) < piece:
                        self.size = self.offset  # only an incomplete line is left
                    piece *= 2
                    continue
                whole = whole or len(data)  # a line longer than `_MOST_BYTES` cannot be a record
                self.offset += whole
                if self.offset + len(data) - whole >= self.size:
                    self.size = self.offset
                if events := list(_records(data[:whole].split(b"\n")[:-1], self._path)):
                    return events
        except FileNotFoundError:
            pass
        return []

    def all(self) -> Iterator[Event]:
        """Yield every record up to the log's end; one piece of the log is in memory at a time."""
        while events := self.new():
            yield from events


def _records(lines: Iterable[bytes], path: Path) -> Iterator[Event]:
    for line in lines:
        try:
            event: Event = _DECODER.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            event = {}
        if isinstance(event.get("kind"), str):
            yield event
        else:
            log.warning("%s: skipping a line that is not an event: %r", path, line[:60])


def changes_words(changes: object) -> str:
    """Return changed knobs as text: `k = 8, domain_weights.sums = 2`."""
    return ", ".join(f"{name} = {value}" for name, value in flat_keys(changes)) if changes else ""


def sentence(event: Event) -> str:
    """Describe an event in a few words, for lists of incidents and alarms and for chart marks."""
    changes = event.get("changes")
    if isinstance(changes, Mapping):
        return cut(f"{changes_words(changes)} by {event.get('who', 'unknown')}")
    for name in ("what", "reason", "waits_for", "path"):
        if event.get(name):
            return cut(f"{event['url']}: {event[name]}" if event.get("url") else event[name])
    names = event.get("names")
    themselves = [*(names if isinstance(names, list) else []), *map(event.get, ("url", "alarm", "domain"))]
    labelled = [(name.replace("_", " "), event.get(name)) for name in ("epoch", "model_version", "orders", "accuracy")]
    parts = [*themselves, *(f"{name} {value}" for name, value in labelled if value not in (None, "", []))]
    return cut(", ".join(str(each) for each in parts if each not in (None, "")))


def cut(text: object) -> str:
    """Return the value as text, cut to a maximum length."""
    shown = str(text)
    return shown if len(shown) <= _MOST_TEXT else shown[: _MOST_TEXT - 1] + "…"


def flat_keys(value: object, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each value in nested tables and lists; a table in a list goes by its `name`."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = {str(each["name"]): each for each in value}
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, each in value.items():
        yield from flat_keys(each, f"{path}.{name}" if path else str(name))


def _whole_length(file: int) -> int:
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _RECENT_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
