"""`Sandbox`: slots of one tier, each with a thread of its own; runs are handed out to those that are free.

A box that is lost is replaced and its run tried once more: what a run finds depends on nothing outside it. A second
loss is told as `SandboxLost`, which verdicts mask.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Final, final

from pipelinerl.verifiers.oubliette import bubblewrap, syscall_filter, toolchains
from pipelinerl.verifiers.oubliette.runs import ProgramResult, Run, SandboxLost, SandboxMissing, Tier
from pipelinerl.verifiers.oubliette.slot import Slot, Walls

#: The user ids of runs, where the sandbox may choose them: one for each slot, in a range that no system hands out.
_FIRST_ID: Final = 60706
_IDS: Final = 400

_SYSTEMS: Final = Path("/usr/bin/python3")
_TRIES: Final = 2
_INTERRUPTED_EVERY_S: Final = 0.2


def default_slots() -> int:
    """One for each core that the process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1


def walls_of(tier: Tier, number: int) -> Walls:
    """What stands around the runs of slot `number`.

    Raises:
        SandboxMissing: this machine cannot have the tier, as far as that is known without trying.
    """
    if sys.platform != "linux" or not syscall_filter.supported():
        raise SandboxMissing(
            f"the {tier} sandbox is for Linux on x86_64; this is {sys.platform} on {os.uname().machine}"
        )
    outer_id = _FIRST_ID + (os.getpid() * 7 + number) % _IDS if os.geteuid() == 0 else os.geteuid()
    if tier is Tier.WEAK:
        return _weak(outer_id)
    if bubblewrap.found() is None:
        raise SandboxMissing(
            f"the {tier} sandbox needs bubblewrap, which is not installed; on Debian and Ubuntu: apt install bubblewrap"
        )
    command = bubblewrap.command(python=bubblewrap.interpreter(), toolchains=toolchains.folders())
    return Walls(tier=tier, command=tuple(command), namespaces=True, outer_id=outer_id, filter=syscall_filter.boxed())


def _weak(outer_id: int) -> Walls:
    """A single process of the host: it starts and signals no other, opens no socket, and reads libraries alone."""
    python = _SYSTEMS if os.geteuid() == 0 else bubblewrap.interpreter()  # root's own may be nobody else's to read
    if not python.exists():
        raise SandboxMissing(f"the {Tier.WEAK} sandbox needs {python} where it is root's; there is none")
    shown = [
        "/usr/lib",
        "/usr/share/zoneinfo",
        "/lib",
        "/lib64",
        "/dev/null",
        "/dev/urandom",
        str(python.parent.parent / "lib"),
    ]
    return Walls(
        tier=Tier.WEAK,
        command=(str(python), "-I", str(bubblewrap.SERVER)),
        namespaces=False,
        outer_id=outer_id,
        filter=syscall_filter.alone(),
        shown=tuple(path for path in shown if os.path.exists(path)),
    )


@final
class Sandbox:
    """Runs programs, `at_once` at a time. To be closed; nothing is started before the first run."""

    def __init__(self, walls: Callable[[int], Walls], *, at_once: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Run, Future[ProgramResult]] | None] = queue.SimpleQueue()
        self._walls = [walls(number) for number in range(at_once)]
        self._threads: list[tuple[threading.Thread, Slot]] = []
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, run: Run) -> Future[ProgramResult]:
        """Its result, some time; or `SandboxLost`."""
        future: Future[ProgramResult] = Future()
        if run.argv and not self._walls[0].namespaces:
            raise toolchains.ToolchainMissing(f"the {self._walls[0].tier} sandbox runs Python alone, not {run.argv[0]}")
        with self._lock:
            if self._closed:
                raise SandboxLost("the sandbox is closed")
            self._queue.put((run, future))
            if len(self._threads) < len(self._walls):
                slot = Slot(self._walls[len(self._threads)])
                thread = threading.Thread(target=self._work, args=(slot,), name="oubliette", daemon=True)
                self._threads.append((thread, slot))
                thread.start()
        return future

    def run(self, run: Run) -> ProgramResult:
        """Wait for it."""
        return self.submit(run).result()

    def close(self) -> None:
        """End every box, and with it what runs; what waits, or ran, is lost."""
        with self._lock:
            self._closed = True
        for _ in self._threads:
            self._queue.put(None)
        for thread, slot in self._threads:
            while thread.is_alive():
                slot.interrupt()
                thread.join(_INTERRUPTED_EVERY_S)

    def _work(self, slot: Slot) -> None:
        try:
            while (work := self._queue.get()) is not None:
                run, future = work
                if self._closed:
                    future.cancel()
                elif future.set_running_or_notify_cancel():
                    self._tried(slot, run, future)
        finally:
            slot.close()

    def _tried(self, slot: Slot, run: Run, future: Future[ProgramResult]) -> None:
        for number in range(_TRIES):
            try:
                result = slot.run(run)
            except SandboxLost as error:
                if number == _TRIES - 1 or self._closed:
                    future.set_exception(error)
                    return
            except OSError as error:  # of the host: no files, no memory, no processes left
                if number == _TRIES - 1 or self._closed:
                    future.set_exception(SandboxLost(f"the host could not run it: {error}"))
                    return
            else:
                future.set_result(result)
                return
