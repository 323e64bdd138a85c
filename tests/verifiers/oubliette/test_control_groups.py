"""Control groups: where they are found, what the kernel adds up in them, and that none is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.verifiers.oubliette import control_groups, toolchains
from pipelinerl.verifiers.oubliette.control_groups import Hierarchies, available, find
from pipelinerl.verifiers.oubliette.runs import Ending, Limits, Tier
from pipelinerl.verifiers.oubliette.sandbox import Sandbox, walls_of
from tests.patience import PATIENCE_S

V1 = """\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
"""
V2 = "31 30 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "own", "places"),
    [
        (V1, "4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n", (1, "memory/a/b", "cpu,cpuacct")),
        (V1.replace("0:27 /", "0:27 /a"), "4:memory:/a/b\n3:cpu,cpuacct:/\n", (1, "memory/b", "cpu,cpuacct")),
        (V1.replace("0:27 /", "0:27 /else"), "4:memory:/a\n3:cpu,cpuacct:/\n", (1, "memory", "cpu,cpuacct")),
        (V2, "0::/user.slice/a.scope\n", (2, "user.slice/a.scope", "user.slice/a.scope")),
        (V1 + V2.replace("/sys/fs/cgroup", "/x"), "4:memory:/\n3:cpu,cpuacct:/\n0::/\n", (1, "memory", "cpu,cpuacct")),
        ("30 25 0:26 / / rw - ext4 /dev/vda rw\n", "0::/\n", None),
        ("", "", None),
    ],
)
def test_where_groups_are_made(mounts: str, own: str, places: tuple[int, str, str] | None) -> None:
    found = find(mounts, own)
    if places is None:
        assert found is None
    else:
        version, memory, cpu = places
        assert found == Hierarchies(version, Path("/sys/fs/cgroup", memory), Path("/sys/fs/cgroup", cpu))


@pytest.fixture
def where() -> Hierarchies:
    found = available()
    if isinstance(found, str):
        pytest.skip(f"left out: control groups, since {found}")
    return found


@pytest.fixture
def slot(where: Hierarchies, sandbox: Sandbox) -> Iterator[Sandbox]:
    alone = Sandbox(lambda number: walls_of(Tier.DEFAULT, number), at_once=1)
    yield alone
    alone.close()


def groups_of(pid: int, where: Hierarchies) -> set[Path]:
    return {group for place in where.places for group in place.glob(f"oubliette-{pid}-*")}


def test_a_slot_has_a_group_until_it_is_closed(where: Hierarchies, slot: Sandbox) -> None:
    before = groups_of(os.getpid(), where)
    assert slot.run(toolchains.find("python").running(b"print(1)", b"", Limits())).stdout == b"1\n"
    mine = groups_of(os.getpid(), where) - before
    assert len(mine) == len(where.places)
    assert all((group / "cgroup.procs").read_text().split() for group in mine), "the box is in it"
    slot.close()
    assert not groups_of(os.getpid(), where) & mine


#: Each child takes a little, and is gone: nobody's time, in the table of processes.
_REAPED = b"""
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        until = time.process_time() + 0.03
        while time.process_time() < until: pass
        os._exit(0)
    time.sleep(0.001)
    try: os.wait()
    except ChildProcessError: pass
"""


def test_the_time_of_children_that_nobody_waited_for_counts(slot: Sandbox) -> None:
    limits = Limits(cpu_s=0.4, wall_s=PATIENCE_S)
    result = slot.run(toolchains.find("python").running(_REAPED, b"", limits))
    assert (result.ending, result.cpu_s >= 0.4) == (Ending.CPU_TIME, True)


def test_what_the_kernel_ends_for_want_of_memory_is_said_to_be_so(
    slot: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The box's own counting is made blind to it: files in memory are not a process'."""
    source = b"open('/tmp/f', 'wb').write(b'x' * (40 << 20))\nx = b'x' * (60 << 20)\nprint(len(x))"
    run = toolchains.find("python").running(source, b"", Limits(memory_bytes=100 << 20, disk_bytes=64 << 20))
    assert slot.run(run).succeeded
    monkeypatch.setattr("pipelinerl.verifiers.oubliette.slot._SERVER_BYTES", -(110 << 20))
    assert slot.run(run).ending is Ending.MEMORY
    monkeypatch.undo()
    assert slot.run(run).succeeded, "and the next run finds its box"


_SERVICE = """
import sys, time
from pipelinerl.verifiers.oubliette import probe
from pipelinerl.verifiers.oubliette.control_groups import ControlGroup, available
where = available()
with probe._baits() as baits:
    groups = [] if isinstance(where, str) else [ControlGroup(where) for _ in range(3)]
    print(baits["PID"], flush=True)
    time.sleep(3600)
"""


def test_whoever_is_killed_leaves_neither_groups_nor_baits(where: Hierarchies) -> None:
    service = subprocess.Popen([sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE)
    try:
        assert service.stdout is not None
        bait = Path("/proc", service.stdout.readline().decode().strip())
        assert bait.exists() and len(groups_of(service.pid, where)) == 3 * len(where.places)
    finally:
        service.send_signal(signal.SIGKILL)
        service.communicate()
    until = time.monotonic() + PATIENCE_S
    while bait.exists() or groups_of(service.pid, where):
        assert time.monotonic() < until, f"left behind: {bait.exists()}, {groups_of(service.pid, where)}"
        time.sleep(0.02)


def test_what_a_killed_janitor_left_is_swept(where: Hierarchies) -> None:
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    left = [place / f"oubliette-{gone.pid}-0" for place in where.places]
    for group in left:
        group.mkdir()
    control_groups.ControlGroup(where).close()
    assert not [group for group in left if group.exists()]
