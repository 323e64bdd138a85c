"""`EventTail`: incremental reader of an event log that grows or is replaced, in bounded pieces.

`EventTail` never writes, locks or blocks. An incomplete line is left for the next call; a malformed line is skipped and
counted. If the file was replaced, or is shorter than what was read, reading starts again at its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelinerl.observability.events import Event, record_of

_PIECE_BYTES: Final = 2**20
#: Maximum length of a line in bytes; a longer line cannot be an event.
_MOST_BYTES: Final = 2**25


@dataclass(frozen=True, slots=True, kw_only=True)
class EventPiece:
    """Events in log order; `is_new_file` is True if they are the first of a file that replaced another file."""

    events: list[Event]
    is_new_file: bool = False


class EventTail:
    """Incremental reader of one event log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: tuple[int, int] | None = None
        self._piece = _PIECE_BYTES
        self.offset = 0
        self.size = 0
        self.unreadable = 0
        """Number of skipped lines."""

    @property
    def is_behind(self) -> bool:
        """True if the last `read` did not reach the log's end; an incomplete last line does not count."""
        return self.offset < self.size

    @property
    def share(self) -> float:
        """Share of the log that has been read, 0 to 1."""
        return self.offset / self.size if self.size else 1.0

    def read(self) -> EventPiece:
        """Return the next events, about 1 MiB at most; empty if nothing is new. Raises OSError if reading fails."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return EventPiece(events=[])
        file = (status.st_dev, status.st_ino)
        is_new_file = self._file is not None and (file != self._file or status.st_size < self.offset)
        if is_new_file:
            self.offset = 0
        self._file, self.size = file, status.st_size
        if not self.is_behind:
            return EventPiece(events=[], is_new_file=is_new_file)
        return EventPiece(events=self._next(), is_new_file=is_new_file)

    def _next(self) -> list[Event]:
        with self._path.open("rb") as file:
            file.seek(self.offset)
            data = file.read(self._piece)
        whole = data.rfind(b"\n") + 1
        if not whole:
            # The last line is incomplete: it is still being written, or its writer was killed.
            if len(data) < self._piece:
                self.size = self.offset
            elif self._piece < _MOST_BYTES:
                self._piece *= 2
            else:
                self.offset += len(data)
                self.unreadable += 1
            return []
        self._piece = _PIECE_BYTES
        self.offset += whole
        if self.offset + len(data) - whole >= self.size:
            self.size = self.offset  # only an incomplete line is left to read
        return [event for line in data[: whole - 1].split(b"\n") if (event := self._event(line)) is not None]

    def _event(self, line: bytes) -> Event | None:
        event = record_of(line)
        self.unreadable += event is None
        return event
