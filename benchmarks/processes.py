"""Processes that end with a `with` block, for benchmarks: `spawned` runs a function in one, `live_run` a whole run."""

from __future__ import annotations

import multiprocessing
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from pipelinerl.observability.events import read_events
from pipelinerl.system.supervised_process import tied

START_TIMEOUT_S: Final = 180.0
_STOP_TIMEOUT_S: Final = 10.0
#: Longest time for which anything of a live run is awaited.
PATIENCE_S: Final = 300.0
T = TypeVar("T")


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
def spawned(target: Callable[..., None], *arguments: Any, timeout_s: float = START_TIMEOUT_S) -> Iterator[Child]:
    """Run `target(*arguments, pipe)` in a new process, which must send a message when ready; end it with the context.

    Raises RuntimeError if the process ends, or sends nothing within `timeout_s`; its output says why.
    """
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(*arguments, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout_s):
            raise RuntimeError(f"{target.__name__} was not ready within {timeout_s:g} s; see its output above")
        try:
            first = ours.recv()
        except EOFError:
            raise RuntimeError(f"{target.__name__} ended before it was ready; see its output above") from None
        assert process.pid is not None
        yield Child(process.pid, ours, first)
    finally:
        process.terminate()
        process.join(_STOP_TIMEOUT_S)


def python(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout_s: float = 3 * 3600.0
) -> str:
    """Run Python with `arguments`, and return its output. Raises RuntimeError with the output's end if it fails."""
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, text=True, capture_output=True, timeout=timeout_s
    )
    if done.returncode:
        output = (done.stdout + done.stderr)[-3000:]
        raise RuntimeError(f"{' '.join(arguments[:4])} ended with {done.returncode}:\n{output}")
    return done.stdout


def open_many_files() -> None:
    """Raise this process's limit of open files to what the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class LiveRun:
    """A `pipelinerl run` in separate processes, all or some of which can be killed. `live_run` makes one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._launcher: subprocess.Popen[bytes] | None = None

    def start(self, arguments: Sequence[str], **environment: str) -> float:
        """Start the launcher, which ends if this process is killed, and return the start time in Unix seconds."""
        began = time.time()
        command = tied([sys.executable, "-m", "pipelinerl.cli", "run", *arguments], "SIGTERM")
        with (self.directory.parent / "launcher.log").open("ab") as log:
            self._launcher = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environment)
        return began

    def kill(self) -> None:
        """Kill all processes of the run."""
        if self._launcher is not None:
            processes = self.processes()
            for process in processes:
                process.kill()
            psutil.wait_procs(processes, timeout=PATIENCE_S)
            self._launcher.wait(PATIENCE_S)
            self._launcher = None

    def processes(self) -> list[psutil.Process]:
        """Return the launcher's process, followed by those below it."""
        assert self._launcher is not None
        launcher = psutil.Process(self._launcher.pid)
        return [launcher, *launcher.children(recursive=True)]

    def waited_for(self, role: str, *, other_than: int = 0) -> psutil.Process:
        """Wait for a process of this role whose process id is not `other_than`, and return the process."""

        def running() -> psutil.Process | None:
            for process in self.processes():
                with suppress(psutil.Error):
                    words = process.cmdline()
                    named = "--name" in words and words[words.index("--name") + 1] == role
                    if named and process.pid != other_than:
                        return process
            return None

        return waited(running, f"a process of the {role}")

    def next(self, kind: str, *, after: float) -> float:
        """Wait for the next event of the kind `kind` after the time `after` in Unix seconds, and return its time."""
        path = self.directory / "events.jsonl"

        def first() -> float | None:
            events = read_events(path) if path.is_file() else []
            return next((event["time"] for event in events if event["kind"] == kind and event["time"] > after), None)

        return waited(first, f"an event of the kind {kind}")


@contextmanager
def live_run(directory: Path) -> Iterator[LiveRun]:
    """Yield a run that is not started yet, whose directory will be `directory`; kill the run at the context's end."""
    live = LiveRun(directory)
    try:
        yield live
    finally:
        live.kill()


def waited(look: Callable[[], T | None], what: str, *, every_s: float = 0.01) -> T:
    """Call `look` until it returns a result other than None, and return the result, which errors call `what`."""
    deadline = time.monotonic() + PATIENCE_S
    while (result := look()) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {PATIENCE_S:g} s")
        time.sleep(every_s)
    return result
