"""`SampleLog`: lines of JSON in rotating files, written by a thread of its own, within a stated number of bytes.

    <run>/samples/  training-000001.jsonl, training-000002.jsonl, … · evaluation-000001.jsonl, …

Promises: `put` never waits, not for the disk either; what comes faster than it is written is left out and counted. All
files of one name together never exceed `max_bytes`: the oldest goes before the next begins. A line is written at once
and never changed; a writer that was killed in the middle of one leaves a torn tail, which readers skip, and whoever
comes after begins a file of its own. A full disk, or a text that cannot be made, costs samples and nothing else.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

from pipelinerl.observability.samples.record import SampleGroup, encode

log = logging.getLogger("pipelinerl")

#: Into so many files the bytes are divided.
_FILES: Final = 8
#: So many puts may wait to be written.
_WAITING: Final = 256

#: What a tokenizer raises, whosever it is; pyo3's, that it is borrowed, too.
_CANNOT_BE_TOLD: Final = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

#: Makes what is to be written; called on the log's thread.
Make = Callable[[], Iterable[SampleGroup]]


@final
class SampleLog:
    """One writer of the files `<name>-*.jsonl` of a directory, which it makes when there is something to write."""

    def __init__(self, directory: Path, name: str, *, max_bytes: int) -> None:
        """`max_bytes` is what the files may come to together."""
        self._directory = directory
        self._name = name
        self._max_bytes = max_bytes
        self._file_bytes = max_bytes // _FILES
        self._file = -1
        self._written = 0
        self._queue: queue.SimpleQueue[Make | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name=f"samples-{name}", daemon=True)
        self._warned = False
        self.left_out = 0
        """Puts that came too fast, and groups that did not fit."""
        self._thread.start()

    def put(self, make: Make) -> None:
        """Have `make` called on another thread and write what it gives, in order, some time soon."""
        if self._queue.qsize() >= _WAITING:
            self.left_out += 1
        else:
            self._queue.put(make)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Write what waits, for at most `timeout_s`."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                for group in make():
                    self._write(group)
            except OSError as error:
                self._leave_out("samples cannot be written to %s: %s; the run goes on", self._directory, error)
            except _CANNOT_BE_TOLD as error:
                self._leave_out("a sample cannot be told: %s: %s; the run goes on", type(error).__name__, error)
        self._close_file()

    def _leave_out(self, why: str, *told: object) -> None:
        self.left_out += 1
        if not self._warned:
            log.warning(why, *told, exc_info=log.isEnabledFor(logging.DEBUG))
        self._warned = True

    def _write(self, group: SampleGroup) -> None:
        line = encode(group, most_bytes=self._file_bytes)
        if line is None:
            self.left_out += 1
            return
        if self._file < 0 or self._written + len(line) > self._file_bytes:
            self._begin_file()
        self._written += len(line)  # first: of a line that was cut by a full disk a part may lie there
        if os.write(self._file, line) < len(line):
            self._close_file()

    def _begin_file(self) -> None:
        """Make room by removing the oldest files, then begin the next."""
        self._close_file()
        self._directory.mkdir(parents=True, exist_ok=True)
        files = sorted(self._directory.glob(f"{self._name}-*.jsonl"))
        number = max((_number(path) for path in files), default=0) + 1
        sizes = {path: _size(path) for path in files}
        for path in files:
            if sum(sizes.values()) + self._file_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            del sizes[path]
        path = self._directory / f"{self._name}-{number:06d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._written = 0

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def _number(path: Path) -> int:
    with suppress(ValueError):
        return int(path.stem.rpartition("-")[2])
    return 0


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
