"""`TensorBoardTracker`: event files for TensorBoard, written with tensorboardX, with each figure exactly once.

Each process writes a new file. The bookmark records all files and their lengths. Bytes beyond those lengths come from a
process that was killed before it saved the bookmark; they are cut off and logged again. After a resume from a
checkpoint, `rewind` removes the repeated steps from all files. The next file then starts with `SessionLog.START`, which
makes an open TensorBoard discard them, too.

The package's record writer is used instead of its `SummaryWriter`, which writes on its own thread, where the exception
of a full disk is lost. The package is imported when a tracker is opened because it imports torch if installed.
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
    """Writer into one directory, which it creates; other files there are left alone."""

    def __init__(self, directory: Path, bookmark: Bookmark | None = None) -> None:
        """Discard what the bookmark does not cover. Raises OSError."""
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
        """Write all figures as one record. Raises OSError."""
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in figures.items()]
        self._write(self._event(wall_time=time, step=step, summary=self._summary(value=values)), time)

    def rewind(self, step: int) -> None:
        """Remove this step and later ones from all files, each atomically. Raises OSError."""
        self._end_file()
        for path in _files(self._directory):
            draft = path.with_name(f"{path.name}.draft")  # TensorBoard does not read this name
            with path.open("rb") as old, draft.open("wb") as new:
                for record, content in _records(old.read()):
                    event = self._event.FromString(content)
                    if not event.HasField("summary") or event.step < step:
                        new.write(record)
            draft.replace(path)
        self._restart_at = step

    def flush(self) -> Bookmark:
        """Make the logged figures durable and return the bookmark. Raises OSError."""
        if self._writer is not None:
            self._writer.flush()
        return {"files": {path.name: path.stat().st_size for path in _files(self._directory)}}

    def close(self) -> None:
        """Close the file; figures that were not flushed may be lost, and are logged again."""
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
