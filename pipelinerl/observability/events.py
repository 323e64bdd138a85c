"""The event log of a run: append-only, one JSON object per line.

    {"time": 1760000000.123, "kind": "step", "elapsed_s": 12.5, "step": 3, "reward": 0.41, ...}

Promises: a line is written with one `write`, so that a reader never sees two records mixed; a writer that was killed in
the middle of a line leaves a torn tail, which readers ignore and the next writer cuts off; nothing that was written is
ever changed. One process writes a log. `Sync` says what a machine that loses power may lose.

Kinds that the controller writes, each with `elapsed_s`: run_started, step, publish, evaluation, engines, knobs,
checkpoint, checkpoint_delayed, evaluation_began, evaluation_restarted, engines_hired, engine_joined, engine_proven,
engine_unproven, engine_suspect, engine_back, engine_draining, engine_lost, group_outdated, stalled,
controller_returned, run_finished. What follows from a decision carries its number as `decision`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self, final

_RECENT_BYTES: Final = 65536

#: One record: `time` (Unix seconds), `kind` and the fields of its kind.
Event = dict[str, Any]


class Sync(StrEnum):
    """When a record is forced to the disk; a killed process loses nothing with either."""

    EACH = "each"
    """Before `write` returns."""
    LATER = "later"
    """By the operating system, within seconds, and at `close`."""


@final
class EventLog:
    """The writer. Opening it cuts off a torn tail; it creates the file and its directory when they are missing."""

    def __init__(self, path: Path, *, sync: Sync = Sync.LATER, clock: Callable[[], float] = time.time) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._sync = sync
        self._clock = clock
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        os.lseek(self._file, _whole_length(self._file), os.SEEK_SET)
        os.ftruncate(self._file, os.lseek(self._file, 0, os.SEEK_CUR))

    def write(self, kind: str, **fields: Any) -> None:
        """Append one record. A number that JSON cannot say (NaN, infinity) is written as null."""
        record = {"time": round(self._clock(), 3), "kind": kind, **fields}
        data = (json.dumps(_sayable(record), separators=(",", ":"), allow_nan=False) + "\n").encode()
        while data:
            data = data[os.write(self._file, data) :]
        if self._sync is Sync.EACH:
            os.fsync(self._file)

    def count_recent(self, **fields: Any) -> int:
        """How many of the records in the last 64 KiB have these values: for a writer that may be repeating itself."""
        end = os.lseek(self._file, 0, os.SEEK_CUR)
        start = max(0, end - _RECENT_BYTES)
        lines = os.pread(self._file, end - start, start).split(b"\n")[1 if start else 0 : -1]
        return sum(fields.items() <= json.loads(line).items() for line in lines)

    def close(self) -> None:
        """Force everything to the disk and close; closing twice is harmless."""
        if self._file >= 0:
            os.fsync(self._file)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(path: Path) -> list[Event]:
    """Every whole record in order, also while the log is being written; a torn tail is ignored.

    Raises:
        FileNotFoundError: there is no log.
        ValueError: a line before the tail is not a record; the message names the line.
    """
    events: list[Event] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            event = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: expected one JSON object, got {line[:60]!r}: {error}") from None
        if not isinstance(event, dict) or "kind" not in event:
            raise ValueError(f"{path}:{number}: expected a JSON object with a kind, got {line[:60]!r}")
        events.append(event)
    return events


def _whole_length(file: int) -> int:
    """Length up to and with the last newline."""
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _RECENT_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _sayable(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _sayable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_sayable(item) for item in value]
    return value
