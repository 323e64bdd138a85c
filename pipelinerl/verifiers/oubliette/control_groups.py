"""`ControlGroup`: one for each slot, where this process may make them; the kernel adds up what all in a box take.

Version 1: a group below this process' own in the hierarchies `memory`, `cpuacct` and, where there is one, `cpu`.
Version 2: a group beside its own, since one that has processes cannot hand on `memory`; the group above must. Where
there is neither, or it may not be written to, there is none, and what the box's server adds up every 20 ms is all that
there is.

Promises: a box is in its group from its first instruction on, and its group is removed when its slot is closed. Where a
process is killed that has made groups, a process of its own, which waits for that, removes them.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Final, final

_NAME: Final = "oubliette"
_NUMBERS: Final = itertools.count()
_REMOVED_WITHIN_S: Final = 10.0
_END_S: Final = 5.0
#: Enters each of the first $1 groups, and becomes the rest.
_ENTER: Final = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 1; shift; n=$((n-1)); done; exec "$@"'
#: Waits for its input's end, and removes this process' groups below the places that it is given, for a minute.
_JANITOR: Final = (
    'name=$1; shift; cat > /dev/null; n=0; while [ "$n" -lt 600 ]; do left=; '
    'for place in "$@"; do for group in "$place/$name"-*; do [ -d "$group" ] || continue; '
    'rmdir "$group" 2> /dev/null || left=1; done; done; [ "$left" ] || exit 0; n=$((n+1)); sleep 0.1; done'
)


class Weight(Enum):
    """What a box gets of a processor that others want, too: as `cpu.shares` of version 1 has it."""

    FULL = 1024
    BEHIND_OTHERS = 256


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """Where groups can be made: the folder above them in each, by version; `shares` where processors are shared out."""

    version: int
    memory: Path
    cpu: Path
    shares: Path | None = None

    @property
    def places(self) -> tuple[Path, ...]:
        """Each once."""
        return tuple(dict.fromkeys(each for each in (self.memory, self.cpu, self.shares) if each is not None))


def find(mounts: str, own: str) -> Hierarchies | None:
    """Where groups might be made, from the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    mounted: dict[str, tuple[str, Path]] = {}
    for line in mounts.splitlines():
        fields, _, rest = line.partition(" - ")
        kind, _, options = ([*rest.split(), "", "", ""])[:3]
        root, place = fields.split()[3:5]
        if kind == "cgroup2":
            mounted.setdefault("", (root, Path(place)))
        elif kind == "cgroup":
            for name in options.split(","):
                mounted.setdefault(name, (root, Path(place)))
    paths: dict[str, str] = {}
    for line in own.splitlines():
        _, names, path = line.split(":", 2)
        paths |= dict.fromkeys(names.split(","), path)

    def of(name: str) -> Path | None:
        if name not in mounted or name not in paths:
            return None
        root, place = mounted[name]
        return place / os.path.relpath(paths[name], root) if paths[name].startswith(root) else place

    memory, cpu, unified = of("memory"), of("cpuacct"), of("")
    if memory is not None and cpu is not None:
        return Hierarchies(1, memory, cpu, of("cpu"))
    if unified is None:
        return None
    above = unified if unified == mounted[""][1] else unified.parent
    return Hierarchies(2, above, above, above)


@cache
def available() -> Hierarchies | str:
    """Where groups can be made, tried once; else why not."""
    try:
        found = find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError as error:
        return str(error)
    if found is None:
        return "no hierarchy with memory and cpuacct, nor a unified one, is mounted"
    if found.version == 2:
        for name in ("memory", "cpu"):
            with contextlib.suppress(OSError):  # whoever may not hand them on may find that done
                (found.memory / "cgroup.subtree_control").write_text(f"+{name}")
    try:
        with contextlib.closing(ControlGroup(found)) as group:
            group.limit(1 << 30)
            group.oom_kills()
            group.cpu_s()
    except OSError as error:
        return f"control groups of version {found.version}: {error}"
    return found


@final
class ControlGroup:
    """A slot's group. To be closed once its box is."""

    def __init__(self, where: Hierarchies) -> None:
        """Raises OSError where it cannot be made."""
        name = f"{_NAME}-{os.getpid()}-{next(_NUMBERS)}"
        self._version = where.version
        self._memory, self._cpu = where.memory / name, where.cpu / name
        self._shares = None if where.shares is None else where.shares / name
        self._groups = tuple(place / name for place in where.places)
        self._limit = 0
        self._weight = Weight.FULL
        self._kills: int | None = None
        self._usage: int | None = None
        _sweep(where.places)
        _start_janitor(where.places)
        try:
            for group in self._groups:
                group.mkdir()
        except BaseException:
            self.close()
            raise

    def entering(self, command: Sequence[str]) -> tuple[str, ...]:
        """A command that is in the group before it is `command`."""
        files = [str(group / "cgroup.procs") for group in self._groups]
        return ("/bin/sh", "-c", _ENTER, "sh", str(len(files)), *files, *command)

    def limit(self, memory_bytes: int) -> None:
        """No more memory than this for all together, files in memory and the kernel's tables included."""
        if memory_bytes == self._limit:
            return
        name = "memory.limit_in_bytes" if self._version == 1 else "memory.max"
        (self._memory / name).write_text(str(memory_bytes))
        self._limit = memory_bytes

    def weigh(self, weight: Weight) -> None:
        """Give all together so much of the processors, where that can be said."""
        if self._shares is None or weight is self._weight:
            return
        name, value = ("cpu.shares", weight.value) if self._version == 1 else ("cpu.weight", weight.value * 100 // 1024)
        with contextlib.suppress(OSError):  # where processors are not handed on
            (self._shares / name).write_text(str(value))
        self._weight = weight

    def oom_kills(self) -> int:
        """How many processes the kernel has killed here for want of memory."""
        if self._kills is None:  # it is asked twice for each run
            name = "memory.oom_control" if self._version == 1 else "memory.events"
            self._kills = os.open(self._memory / name, os.O_RDONLY | os.O_CLOEXEC)
        _, _, count = os.pread(self._kills, 4096, 0).partition(b"oom_kill ")
        return int(count.split()[0]) if count else 0

    def cpu_s(self) -> float:
        """Processor seconds that all have taken so far."""
        if self._usage is None:
            self._usage = self.open_cpu()
        text = os.pread(self._usage, 256, 0)
        return int(text) / 1e9 if self._version == 1 else int(text.split()[1]) / 1e6

    def open_cpu(self) -> int:
        """The file that says how much processor time all have taken: nanoseconds, or `usage_usec` and microseconds."""
        name = "cpuacct.usage" if self._version == 1 else "cpu.stat"
        return os.open(self._cpu / name, os.O_RDONLY | os.O_CLOEXEC)

    def processes(self) -> list[int]:
        """Those that are in it now."""
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self._cpu / "cgroup.procs").read_text().split()]
        return []

    def kill_all(self) -> None:
        """End what is in the group, and wait until nothing is."""
        until = time.monotonic() + _REMOVED_WITHIN_S
        while self.processes() and time.monotonic() < until:
            _kill(self._cpu)
            time.sleep(0.002)

    def close(self) -> None:
        """End what is in the group, if anything is, and remove it."""
        for file in (self._kills, self._usage):
            if file is not None:
                os.close(file)
        self._kills = self._usage = None
        for group in self._groups:
            until = time.monotonic() + _REMOVED_WITHIN_S
            while group.exists():
                _kill(group)
                try:
                    group.rmdir()
                except OSError:
                    if time.monotonic() > until:
                        break  # the janitor goes on trying
                    time.sleep(0.005)


def _kill(group: Path) -> None:
    with contextlib.suppress(OSError):
        if (group / "cgroup.kill").exists():
            (group / "cgroup.kill").write_text("1")
            return
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


def _sweep(places: Sequence[Path]) -> None:
    """Remove what processes have left whose janitors were killed, too."""
    for place in places:
        for group in place.glob(f"{_NAME}-*-*"):
            if not Path("/proc", group.name.split("-")[1]).exists():
                with contextlib.suppress(OSError):
                    group.rmdir()


# --- the janitor ------------------------------------------------------------------------------------------------------

_janitors: dict[int, subprocess.Popen[bytes]] = {}


def _start_janitor(places: Sequence[Path]) -> None:
    """One for each process that makes groups; it is told of nothing but this process' end."""
    pid = os.getpid()
    if pid in _janitors:
        return
    command = ["/bin/sh", "-c", _JANITOR, "sh", f"{_NAME}-{pid}", *map(str, places)]
    _janitors[pid] = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd="/", env={},
        start_new_session=True,
    )  # fmt: skip
    atexit.register(_end_janitor, pid)


def _end_janitor(pid: int) -> None:
    janitor = _janitors.pop(pid, None)
    if janitor is None or pid != os.getpid():
        return
    assert janitor.stdin is not None
    janitor.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        janitor.wait(_END_S)
