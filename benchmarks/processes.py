"""Child processes of benchmarks: the context manager `spawned` starts a process and ends it on exit."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Final

START_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Child:
    """A child process that has started: its id, the pipe to it, and the first message that it sent."""

    pid: int
    pipe: Connection
    first: Any

    def call(self, message: Any, *, timeout_s: float = START_TIMEOUT_S) -> Any:
        """Send a message to the child and return its answer."""
        self.pipe.send(message)
        if not self.pipe.poll(timeout_s):
            raise TimeoutError(f"process {self.pid} did not answer within {timeout_s:g} s")
        return self.pipe.recv()


@contextmanager
def spawned(target: Callable[..., None], *arguments: Any) -> Iterator[Child]:
    """Run `target(*arguments, pipe)` in a new process, which must send a message when ready; end it with the context.

    Raises RuntimeError if the process ends or sends nothing; its output says why.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise RuntimeError(f"{target.__name__} was not ready within {START_TIMEOUT_S:g} s; see its output above")
        try:
            first = ours.recv()
        except EOFError:
            raise RuntimeError(f"{target.__name__} ended before it was ready; see its output above") from None
        assert process.pid is not None
        yield Child(process.pid, ours, first)
    finally:
        process.terminate()
        process.join(_STOP_TIMEOUT_S)


def open_many_files() -> None:
    """Raise this process's limit of open files to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
