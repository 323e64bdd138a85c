"""`TensorBoardTracker`: event files that TensorBoard reads, written with tensorboardX, each figure in them once.

Each life of the process begins a file of its own. Its bookmark says which files there were, and how long each was: what
lies beyond was logged by a life that was killed before it could say so, comes again, and is cut off. Of a run that goes
on from a checkpoint, the steps that are taken again are taken out of the files (`rewind`), and the next file begins
with the mark by which a TensorBoard that is open forgets them, too (`SessionLog.START`).

Written with the package's record writer, not with its `SummaryWriter`: that one writes on a thread of its own, where a
disk that is full is an exception which nobody sees. The package is imported when a tracker is opened: it takes torch
with it, where there is one.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, final

from pipelinerl.observability.trackers.tracker import Bookmark

_VERSION: Final = "brain.Event:2"
_PATTERN: Final = "events.out.tfevents.*.pipelinerl"


@final
class TensorBoardTracker:
    """Writes into one directory, which it makes; other files there are left alone."""

    def __init__(self, directory: Path, bookmark: Bookmark | None = None) -> None:
        """Raises OSError."""
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
        """One record for all of them. Raises OSError."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(self._event(wall_time=time, step=step, summary=self._summary(value=values)), time)

    def rewind(self, step: int) -> None:
        """Take that step and later ones out of all files, each whole or not at all. Raises OSError."""
        self._end_file()
        for path in _files(self._directory):
            draft = path.with_name(f"{path.name}.draft")  # no name that TensorBoard would read
            with path.open("rb") as old, draft.open("wb") as new:
                for record, content in _records(old.read()):
                    event = self._event.FromString(content)
                    if not event.HasField("summary") or event.step < step:
                        new.write(record)
            draft.replace(path)
        self._restart_at = step

    def flush(self) -> Bookmark:
        """What was logged is on the disk. Raises OSError."""
        if self._writer is not None:
            self._writer.flush()
        return {"files": {path.name: path.stat().st_size for path in _files(self._directory)}}

    def close(self) -> None:
        """Close the file; what was not flushed may be lost, and comes again."""
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
    """Each whole record, and its event: length (u64), its checksum (u32), event, checksum (u32), as TFRecord has."""
    at = 0
    while at + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        end = at + 12 + length + 4
        if end > len(data):
            return
        yield data[at:end], data[at + 12 : end - 4]
        at = end
