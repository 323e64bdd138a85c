"""`SampleLog`: JSON lines in rotating files, written by a background thread, within a byte limit.

    <run>/samples/  training-000001.jsonl, training-000002.jsonl, … · evaluation-000001.jsonl, …

Guarantees:

- `put` never blocks, not even on the disk. Samples that arrive faster than they are written are dropped and counted.
- All files of one log (such as `training`) together never exceed `max_bytes`: the oldest is removed before a new one
  begins.
- A line is written in one piece and never changed. A killed writer may leave an incomplete last line, which readers
  skip; the next writer starts a new file.
- If the disk is full, or a sample cannot be built, only samples are lost: the run continues.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from pipelinerl.observability.samples.record import SampleGroup, encode

log = logging.getLogger("pipelinerl")

#: The byte limit is divided among this many files.
_FILES: Final = 8
#: Maximum length of the queue of `put` calls that wait for the writer thread.
_WAITING: Final = 256

#: Exceptions that building a sample may raise; tokenizers raise these, including pyo3's "already borrowed".
_BUILD_ERRORS: Final = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

#: A function that builds the groups to write; the writer thread calls it.
Make = Callable[[], Iterable[SampleGroup]]


class SampleLog:
    """One writer of the files `<name>-*.jsonl` in a directory, which it creates when needed."""

    def __init__(self, directory: Path, name: str, *, max_bytes: int) -> None:
        """Start the writer thread; `max_bytes` limits the total size of the files."""
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
        """Number of `put` calls dropped for a full queue or an error, plus the number of groups too long for a file."""
        self._thread.start()

    def put(self, make: Make) -> None:
        """Queue `make` for the writer thread, which calls it and writes the groups that it returns, in order."""
        if self._queue.qsize() >= _WAITING:
            self.left_out += 1
        else:
            self._queue.put(make)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Write the queued samples and stop the thread, within `timeout_s` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                for group in make():
                    self._write(group)
            except OSError as error:
                self._leave_out("samples cannot be written to %s: %s; the run continues", self._directory, error)
            except _BUILD_ERRORS as error:
                self._leave_out("a sample cannot be built: %s: %s; the run continues", type(error).__name__, error)
        self._close_file()

    def _leave_out(self, why: str, *arguments: object) -> None:
        self.left_out += 1
        if not self._warned:
            log.warning(why, *arguments, exc_info=log.isEnabledFor(logging.DEBUG))
        self._warned = True

    def _write(self, group: SampleGroup) -> None:
        line = encode(group, most_bytes=self._file_bytes)
        if line is None:
            self.left_out += 1
            return
        if self._file < 0 or self._written + len(line) > self._file_bytes:
            self._begin_file()
        self._written += len(line)  # count before writing, since a full disk may leave part of the line in the file
        if os.write(self._file, line) < len(line):
            self._close_file()

    def _begin_file(self) -> None:
        self._close_file()
        self._directory.mkdir(parents=True, exist_ok=True)
        files = sorted(self._directory.glob(f"{self._name}-*.jsonl"))
        numbers = (path.stem.rpartition("-")[2] for path in files)
        number = max((int(number) for number in numbers if number.isdecimal()), default=0) + 1
        sizes = {path: path.stat().st_size for path in files if path.exists()}
        for path in list(sizes):
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
