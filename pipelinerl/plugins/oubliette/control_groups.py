"""`ControlGroup`: a kernel control group (cgroup) that limits a guest, the sandboxed process tree of one slot.

With cgroup version 1, the group lies below this process's own group in the hierarchies `memory`, `cpuacct` and, if
present, `cpu`. With version 2, it is a sibling of this process's own group, since a group with processes cannot
delegate `memory`. Without either hierarchy, or without write access, there is no group: memory is then limited only by
the guest's server, which sums the memory of its processes every 20 ms.

A guest is in its group from its first instruction, and the group is removed when the slot is closed. If this process is
killed, a janitor process removes its groups.
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
from functools import cache
from pathlib import Path
from typing import Final

_NAME: Final = "oubliette"
_NUMBERS: Final = itertools.count()
#: A group's share of the processors when they are contended, in units of version 1's `cpu.shares`.
FULL_WEIGHT: Final = 1024
LOW_WEIGHT: Final = 256
_REMOVED_WITHIN_S: Final = 10.0
_END_S: Final = 5.0
#: Shell script with the arguments: number of groups, groups, command. It enters the groups and becomes the command.
_ENTER: Final = 'n=$1; shift; while [ "$n" -gt 0 ]; do echo 0 > "$1" || exit 1; shift; n=$((n-1)); done; exec "$@"'
#: Shell script that waits for the end of its input, then removes this process's groups below the given paths, with
#: retries for a minute.
_JANITOR: Final = (
    'name=$1; shift; cat > /dev/null; n=0; while [ "$n" -lt 600 ]; do left=; '
    'for place in "$@"; do for group in "$place/$name"-*; do [ -d "$group" ] || continue; '
    'rmdir "$group" 2> /dev/null || left=1; done; done; [ "$left" ] || exit 0; n=$((n+1)); sleep 0.1; done'
)


@dataclass(frozen=True, slots=True)
class Hierarchies:
    """The folder of each cgroup hierarchy in which groups are created; `shares` is None if no shares can be set."""

    version: int
    memory: Path
    cpu: Path
    shares: Path | None = None

    @property
    def places(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys(each for each in (self.memory, self.cpu, self.shares) if each is not None))


def find(mounts: str, own: str) -> Hierarchies | None:
    """Return the folders for groups, from the texts of /proc/self/mountinfo and /proc/self/cgroup; None without any."""
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
    """Create a group as a test; return the folders for groups, or the reason why none can be created."""
    try:
        hierarchies = find(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    except OSError as error:
        return str(error)
    if hierarchies is None:
        return "no hierarchy with memory and cpuacct, nor a unified one, is mounted"
    if hierarchies.version == 2:
        for name in ("memory", "cpu"):
            with contextlib.suppress(OSError):  # fails if the controller is delegated already
                (hierarchies.memory / "cgroup.subtree_control").write_text(f"+{name}")
    try:
        with contextlib.closing(ControlGroup(hierarchies)) as group:
            group.limit(1 << 30)
            group.oom_kills()
            group.cpu_s()
    except OSError as error:
        return f"control groups of version {hierarchies.version}: {error}"
    return hierarchies


class ControlGroup:
    """The control group that limits the guest of one slot; call `close` after the guest has ended."""

    def __init__(self, where: Hierarchies) -> None:
        name = f"{_NAME}-{os.getpid()}-{next(_NUMBERS)}"
        self._version = where.version
        self._memory, self._cpu = where.memory / name, where.cpu / name
        self._cpu_file = self._cpu / ("cpuacct.usage" if where.version == 1 else "cpu.stat")
        self._shares = None if where.shares is None else where.shares / name
        self._groups = tuple(place / name for place in where.places)
        self._limit = 0
        self._weight = FULL_WEIGHT
        for place in where.places:  # remove groups left behind by processes whose janitors were also killed
            for group in place.glob(f"{_NAME}-*-*"):
                if not Path("/proc", group.name.split("-")[1]).exists():
                    with contextlib.suppress(OSError):
                        group.rmdir()
        _start_janitor(where.places)
        try:
            for group in self._groups:
                group.mkdir()
        except BaseException:
            self.close()
            raise

    def entering(self, command: Sequence[str]) -> tuple[str, ...]:
        """Return a command that enters the group before it executes `command`."""
        files = [str(group / "cgroup.procs") for group in self._groups]
        return ("/bin/sh", "-c", _ENTER, "sh", str(len(files)), *files, *command)

    def limit(self, memory_bytes: int) -> None:
        """Limit the total memory of the group's processes, including files in memory and kernel tables."""
        if memory_bytes == self._limit:
            return
        name = "memory.limit_in_bytes" if self._version == 1 else "memory.max"
        (self._memory / name).write_text(str(memory_bytes))
        self._limit = memory_bytes

    def weigh(self, weight: int) -> None:
        """Set the group's share of the processors, if the hierarchy supports it."""
        if self._shares is None or weight == self._weight:
            return
        name, value = ("cpu.shares", weight) if self._version == 1 else ("cpu.weight", weight * 100 // FULL_WEIGHT)
        with contextlib.suppress(OSError):  # fails if the cpu controller is not delegated
            (self._shares / name).write_text(str(value))
        self._weight = weight

    def oom_kills(self) -> int:
        """Return the number of the group's processes that the kernel has killed for lack of memory."""
        name = "memory.oom_control" if self._version == 1 else "memory.events"
        _, _, count = (self._memory / name).read_text().partition("oom_kill ")
        return int(count.split()[0]) if count else 0

    def cpu_s(self) -> float:
        text = self._cpu_file.read_text()
        return int(text) / 1e9 if self._version == 1 else int(text.split()[1]) / 1e6

    def open_cpu(self) -> int:
        """Open the file with the group's processor time: nanoseconds; in version 2, `usage_usec` (microseconds)."""
        return os.open(self._cpu_file, os.O_RDONLY | os.O_CLOEXEC)

    def processes(self) -> list[int]:
        with contextlib.suppress(OSError):
            return [int(pid) for pid in (self._cpu / "cgroup.procs").read_text().split()]
        return []

    def kill_all(self) -> None:
        until = time.monotonic() + _REMOVED_WITHIN_S
        while self.processes() and time.monotonic() < until:
            _kill(self._cpu)
            time.sleep(0.002)

    def close(self) -> None:
        for group in self._groups:
            until = time.monotonic() + _REMOVED_WITHIN_S
            while group.exists():
                _kill(group)
                try:
                    group.rmdir()
                except OSError:
                    if time.monotonic() > until:
                        break  # the janitor process will remove this group
                    time.sleep(0.005)


def _kill(group: Path) -> None:
    with contextlib.suppress(OSError):
        if (group / "cgroup.kill").exists():
            (group / "cgroup.kill").write_text("1")
            return
        for pid in (group / "cgroup.procs").read_text().split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)


# --- the janitor ------------------------------------------------------------------------------------------------------

_janitors: dict[int, subprocess.Popen[bytes]] = {}


def _start_janitor(places: Sequence[Path]) -> None:
    """Start the janitor unless it runs: a process that removes this process's groups when its input, a pipe, ends."""
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
