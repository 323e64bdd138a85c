"""`Sandbox`: runs programs in several slots of one tier (strength of isolation), each with its own thread.

A slot executes one run at a time in its guest, a sandboxed process tree (`slot.py`). A lost guest is replaced, and its
run is retried once. If the second guest is lost, too, `SandboxLost` is raised, and the verdict is masked.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pipelinerl.plugins.oubliette import bubblewrap, control_groups, gvisor, syscall_filter, toolchains
from pipelinerl.plugins.oubliette.gvisor import GvisorSlot
from pipelinerl.plugins.oubliette.runs import ProgramResult, Run, SandboxLost, SandboxMissing, Tier
from pipelinerl.plugins.oubliette.slot import Isolation, Slot

#: First user id for runs, in a range that no system assigns. If this process is root, each slot gets its own id.
_FIRST_ID: Final = 60706
_IDS: Final = 400

_SYSTEMS: Final = Path("/usr/bin/python3")
_TRIES: Final = 2
#: Seconds after which a run (`_FRESH_S`) or a starting guest (`_STARTING_S`) no longer keeps another run from starting.
_FRESH_S: Final = 0.1
_STARTING_S: Final = 1.0
_LOOKED_EVERY_S: Final = 0.05
_SLOTS_EACH: Final = 4
_INTERRUPTED_EVERY_S: Final = 0.2


def isolation_of(tier: Tier, number: int) -> Isolation:
    """Return the isolation of the runs of slot `number`. Raises `SandboxMissing` if this machine lacks the tier."""
    if sys.platform != "linux" or not syscall_filter.supported():
        raise SandboxMissing(
            f"the {tier} sandbox is for Linux on x86_64; this is {sys.platform} on {os.uname().machine}"
        )
    if tier is Tier.STRONG:
        if gvisor.executable() is None:
            raise SandboxMissing(
                f"the {Tier.STRONG} sandbox needs gVisor's runsc, which is not installed; on Debian: apt install runsc"
            )
        if isinstance(why := control_groups.available(), str):
            raise SandboxMissing(f"the {Tier.STRONG} sandbox needs control groups, which cannot be created here: {why}")
        return Isolation(tier=Tier.STRONG, command=(), namespaces=True, outer_id=0, filter=b"")
    outer_id = _FIRST_ID + (os.getpid() * 7 + number) % _IDS if os.geteuid() == 0 else os.geteuid()
    if tier is Tier.WEAK:
        return _weak(outer_id)
    if bubblewrap.executable() is None:
        raise SandboxMissing(
            f"the {tier} sandbox needs bubblewrap, which is not installed; on Debian and Ubuntu: apt install bubblewrap"
        )
    command = bubblewrap.command(python=bubblewrap.interpreter(), toolchains=toolchains.folders())
    return Isolation(
        tier=tier,
        command=tuple(command),
        namespaces=True,
        outer_id=outer_id,
        filter=syscall_filter.of_runs(),
        servers_filter=syscall_filter.of_servers(),
    )


def _weak(outer_id: int) -> Isolation:
    """Return the weak isolation: a run is one host process, without children or sockets, that reads only libraries."""
    # If this process is root, use the system's Python: programs run as another user, who may not read root's files.
    python = _SYSTEMS if os.geteuid() == 0 else bubblewrap.interpreter()
    if not python.exists():
        raise SandboxMissing(f"the {Tier.WEAK} sandbox needs {python} when run as root, which does not exist")
    shown = [
        "/usr/lib",
        "/usr/share/zoneinfo",
        "/lib",
        "/lib64",
        "/dev/null",
        "/dev/urandom",
        str(python.parent.parent / "lib"),
    ]
    return Isolation(
        tier=Tier.WEAK,
        command=(str(python), "-I", "-S", str(bubblewrap.SERVER)),
        namespaces=False,
        outer_id=outer_id,
        filter=syscall_filter.alone(),
        shown=tuple(path for path in shown if os.path.exists(path)),
    )


@dataclass(slots=True)
class _Place:
    """A slot (which runs one program at a time), its thread, and the state of its current run.

    Attributes:
        given: time at which the slot got its current run; None without a run.
        fresh: whether the run still counts towards the sandbox's limit `at_once`; False once it takes long.
        behind: whether no more lowering of the run's processor share is needed or possible.
    """

    slot: Slot | GvisorSlot
    thread: threading.Thread | None = None
    given: float | None = None
    fresh: bool = False
    behind: bool = False


class Sandbox:
    """Runs up to `at_once` programs at a time, in `at_once` · `slots_each` slots. The caller must close the sandbox.

    A run that takes longer than `_FRESH_S` no longer counts towards `at_once`, so that other runs do not wait for
    endless programs. If it uses much processor time, its processor share is lowered if control groups support that.
    """

    def __init__(self, isolation: Callable[[int], Isolation], *, at_once: int, slots_each: int = _SLOTS_EACH) -> None:
        self._isolation = [isolation(number) for number in range(slots_each * at_once)]
        self._at_once = at_once
        self._waiting: deque[tuple[Run, Future[ProgramResult]]] = deque()
        self._places: list[_Place] = []
        self._idle = self._fresh = self._starting = 0
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._begun = threading.Condition(lock)
        self._watch: threading.Thread | None = None
        self._watching = False
        self._closed = False

    def submit(self, run: Run) -> Future[ProgramResult]:
        """Queue a run; the future holds its result or `SandboxLost`."""
        future: Future[ProgramResult] = Future()
        if run.argv and not self._isolation[0].namespaces:
            raise toolchains.ToolchainMissing(
                f"the {self._isolation[0].tier} sandbox runs only Python, not {run.argv[0]}"
            )
        with self._changed:
            if self._closed:
                raise SandboxLost("the sandbox is closed")
            self._waiting.append((run, future))
            self._assign_waiting_run()
        return future

    def run(self, run: Run) -> ProgramResult:
        return self.submit(run).result()

    def close(self) -> None:
        """End all guests and the programs that run in them; queued runs fail."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            self._begun.notify()
        for place in self._places:
            while place.thread is not None and place.thread.is_alive():
                place.slot.interrupt()
                place.thread.join(_INTERRUPTED_EVERY_S)
        if self._watch is not None:
            self._watch.join()

    def _assign_waiting_run(self) -> None:
        """Wake or start a slot's thread if there is work and capacity. Requires the lock."""
        if self._closed or not self._waiting or self._fresh >= self._at_once:
            return
        if self._idle:
            self._changed.notify()
        elif len(self._places) < len(self._isolation) and self._fresh + self._starting < self._at_once:
            self._starting += 1
            isolation = self._isolation[len(self._places)]
            place = _Place(GvisorSlot() if isolation.tier is Tier.STRONG else Slot(isolation))
            place.thread = threading.Thread(target=self._work, args=(place,), name="oubliette", daemon=True)
            self._places.append(place)
            place.thread.start()
            if self._watch is None:
                self._watch = threading.Thread(target=self._watch_runs, name="oubliette watch", daemon=True)
                self._watch.start()

    def _next(self, place: _Place) -> tuple[Run, Future[ProgramResult]] | None:
        """Mark the slot as idle and wait for its next run; None if the sandbox is closed and no run is queued."""
        with self._changed:
            place.given = None
            self._no_longer_fresh(place)
            self._idle += 1
            while not self._closed and not (self._waiting and self._fresh < self._at_once):
                self._changed.wait()
            self._idle -= 1
            if not self._waiting:
                return None
            self._fresh += 1
            place.given, place.fresh, place.behind = time.monotonic(), True, False
            work = self._waiting.popleft()
            self._assign_waiting_run()
            if not self._watching:
                self._begun.notify()
            return work

    def _work(self, place: _Place) -> None:
        try:
            place.slot.start()  # start first, take a run then: an idle slot may take it meanwhile
            with self._changed:
                self._starting -= 1
            while (work := self._next(place)) is not None:
                run, future = work
                if self._closed:
                    future.cancel()
                elif future.set_running_or_notify_cancel():
                    self._tried(place.slot, run, future)
        finally:
            place.slot.close()

    def _watch_runs(self) -> None:
        """Loop: stop counting long runs towards `at_once`, so that queued runs start; lower their processor share."""
        with self._changed:
            while not self._closed:
                self._watching = any(place.given is not None and not place.behind for place in self._places)
                self._begun.wait(_LOOKED_EVERY_S if self._watching else None)
                now = time.monotonic()
                for place in tuple(self._places):
                    if place.given is None:
                        continue
                    began = place.slot.began
                    if now - (place.given + _STARTING_S if began is None else began + _FRESH_S) > 0:
                        self._no_longer_fresh(place)
                        self._assign_waiting_run()
                        if began is not None:
                            place.behind = place.behind or place.slot.group.goes_behind()

    def _no_longer_fresh(self, place: _Place) -> None:
        if place.fresh:
            place.fresh = False
            self._fresh -= 1

    def _tried(self, slot: Slot | GvisorSlot, run: Run, future: Future[ProgramResult]) -> None:
        for number in range(_TRIES):
            try:
                result = slot.run(run)
            except (SandboxLost, OSError) as error:
                if number < _TRIES - 1 and not self._closed:
                    continue
                if isinstance(error, OSError):  # the host has run out of file descriptors, memory or processes, say
                    error = SandboxLost(f"the host could not run it: {error}")
                future.set_exception(error)
            else:
                future.set_result(result)
            return
