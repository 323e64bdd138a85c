"""Control groups (Linux) of sandboxed programs: setup, limits and accounting of processes, and removal."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.plugins.oubliette import control_groups, toolchains
from pipelinerl.plugins.oubliette.control_groups import (
    FULL_WEIGHT,
    LOW_WEIGHT,
    ControlGroup,
    Hierarchies,
    available,
    find,
)
from pipelinerl.plugins.oubliette.runs import Ending, Limits, Tier
from pipelinerl.plugins.oubliette.sandbox import Sandbox, isolation_of
from tests.patience import PATIENCE_S, wait_until

V1 = """\
30 25 0:26 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755
31 30 0:27 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory
32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct
"""
_BOTH = ("cpu,cpuacct", "cpu,cpuacct")
V2 = "31 30 0:27 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("mounts", "own", "places"),
    [
        (V1, "4:memory:/a/b\n3:cpu,cpuacct:/\n0::/\n", (1, "memory/a/b", *_BOTH)),
        (V1.replace("0:27 /", "0:27 /a"), "4:memory:/a/b\n3:cpu,cpuacct:/\n", (1, "memory/b", *_BOTH)),
        (V1.replace("0:27 /", "0:27 /else"), "4:memory:/a\n3:cpu,cpuacct:/\n", (1, "memory", *_BOTH)),
        (V1.replace("rw,cpu,", "rw,"), "4:memory:/\n3:cpuacct:/\n", (1, "memory", "cpu,cpuacct", None)),
        (V2, "0::/user.slice/a.service/main\n", (2, *3 * ["user.slice/a.service"])),
        (V2, "0::/\n", (2, *3 * [""])),
        (V1 + V2.replace("/sys/fs/cgroup", "/x"), "4:memory:/\n3:cpu,cpuacct:/\n0::/\n", (1, "memory", *_BOTH)),
        ("30 25 0:26 / / rw - ext4 /dev/vda rw\n", "0::/\n", None),
        ("", "", None),
    ],
)
def test_control_group_paths_are_derived_from_the_mounts_and_this_processs_own_group(mounts, own, places):
    hierarchies = find(mounts, own)
    if places is None:
        assert hierarchies is None
    else:
        version, memory, cpu, shares = places
        root = Path("/sys/fs/cgroup")
        assert hierarchies == Hierarchies(version, root / memory, root / cpu, None if shares is None else root / shares)


def test_limits_and_statistics_of_version_two_control_groups_are_written_and_read(tmp_path, monkeypatch):
    """Plain files replace a real version 2 hierarchy, since test machines do not delegate its memory controller."""
    monkeypatch.setattr(control_groups, "_start_janitor", lambda places: None)
    group = ControlGroup(Hierarchies(2, tmp_path, tmp_path, tmp_path))
    (folder,) = tmp_path.iterdir()
    (folder / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 5\noom_kill 3\noom_group_kill 9\n")
    (folder / "cpu.stat").write_text("usage_usec 1250000\nuser_usec 1000000\nsystem_usec 250000\n")
    group.limit(64 << 20)
    group.weigh(LOW_WEIGHT)
    assert (folder / "memory.max").read_text() == f"{64 << 20}"
    assert (folder / "cpu.weight").read_text() == "25"
    assert (group.oom_kills(), group.cpu_s()) == (3, 1.25)
    assert group.entering(["run"])[4:] == ("1", f"{folder}/cgroup.procs", "run")
    for file in folder.iterdir():
        file.unlink()  # plain files would prevent rmdir, unlike the kernel's files in a real control group
    group.close()
    assert not folder.exists()


def test_killing_a_version_two_control_group_kills_all_its_processes(where):
    """The test uses a real version 2 hierarchy, if one is mounted in addition to version 1."""
    unified = Path("/sys/fs/cgroup/unified")
    if not (unified / "cgroup.procs").exists():
        pytest.skip("left out: a group of version 2, since none is mounted in addition to version 1")
    group = unified / f"oubliette-{os.getpid()}-own"
    group.mkdir()
    try:
        if not (group / "cgroup.kill").exists():
            pytest.skip("left out: cgroup.kill, which this kernel does not have")
        enter = f'echo 0 > "{group}/cgroup.procs" || exit 1; echo in; sleep 3600 & sleep 3600'
        with subprocess.Popen(["/bin/sh", "-c", enter], stdout=subprocess.PIPE) as shell:
            assert shell.stdout is not None
            assert shell.stdout.readline() == b"in\n"
            control_groups._kill(group)
            assert shell.stdout.read() == b"", "all processes that held the pipe have ended"
            assert shell.wait(PATIENCE_S) == -signal.SIGKILL
    finally:

        def removed():
            with contextlib.suppress(OSError):
                group.rmdir()
            return not group.exists()

        wait_until(removed, "the control group is empty")


@pytest.fixture
def where():
    hierarchies = available()
    if isinstance(hierarchies, str):
        pytest.skip(f"left out: control groups, since {hierarchies}")
    return hierarchies


def groups_of(pid, where):
    return {group for place in where.places for group in place.glob(f"oubliette-{pid}-*")}


def test_sandboxed_programs_have_a_control_group_until_the_sandbox_is_closed(where, alone):
    before = groups_of(os.getpid(), where)
    assert alone.run(toolchains.find("python").running(b"print(1)", b"", Limits())).stdout == b"1\n"
    mine = groups_of(os.getpid(), where) - before
    assert len(mine) == len(where.places)
    assert all((group / "cgroup.procs").read_text().split() for group in mine), "the guest is in it"
    alone.close()
    assert not groups_of(os.getpid(), where) & mine


#: A program whose children each use some CPU time and are reaped, so that the process table no longer shows that time.
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


@pytest.mark.usefixtures("where")
def test_cpu_time_of_ended_child_processes_counts_towards_a_sandboxed_programs_limit(alone):
    limits = Limits(cpu_s=0.4, wall_s=PATIENCE_S)
    result = alone.run(toolchains.find("python").running(_REAPED, b"", limits))
    assert (result.ending, result.cpu_s >= 0.4) == (Ending.CPU_TIME, True)


@pytest.fixture
def weighed(where, sandbox):
    if where.shares is None or where.version != 1:
        pytest.skip("left out: shares of processors, which no hierarchy of version 1 has here")

    def shares(group):
        assert group is not None and group._shares is not None
        return int((group._shares / "cpu.shares").read_text())

    yield shares


def test_sandboxed_program_that_uses_much_cpu_time_has_a_lower_cpu_share_until_it_ends(weighed):
    alone = Sandbox(lambda number: isolation_of(Tier.DEFAULT, number), at_once=1, slots_each=1)
    try:
        short = toolchains.find("python").running(b"print(1)", b"", Limits())
        assert alone.run(short).stdout == b"1\n"
        group = alone._places[0].slot.group.group
        assert weighed(group) == FULL_WEIGHT
        endless = toolchains.find("python").running(b"while True: pass", b"", Limits(cpu_s=1, wall_s=3600))
        ending = alone.submit(endless)
        wait_until(lambda: weighed(group) == LOW_WEIGHT, "the program has a lower CPU share")
        assert ending.result(PATIENCE_S).ending is Ending.CPU_TIME
        assert alone.run(short).stdout == b"1\n" and weighed(group) == FULL_WEIGHT
    finally:
        alone.close()


@pytest.mark.usefixtures("where")
def test_sandboxed_program_that_the_kernel_kills_for_lack_of_memory_counts_as_over_its_memory_limit(alone, monkeypatch):
    """Files in a memory file system belong to no process, so only the kernel's accounting counts them."""
    source = b"open('/tmp/f', 'wb').write(b'x' * (40 << 20))\nx = b'x' * (60 << 20)\nprint(len(x))"
    run = toolchains.find("python").running(source, b"", Limits(memory_bytes=100 << 20, disk_bytes=64 << 20))
    assert alone.run(run).succeeded
    limit = ControlGroup.limit
    monkeypatch.setattr(ControlGroup, "limit", lambda group, size: limit(group, size - (174 << 20)))
    assert alone.run(run).ending is Ending.MEMORY
    monkeypatch.undo()
    assert alone.run(run).succeeded, "the next run works again"


_SERVICE = """
import sys, time
from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.control_groups import ControlGroup, available
where = available()
with probe._baits() as baits:
    groups = [] if isinstance(where, str) else [ControlGroup(where) for _ in range(3)]
    print(baits["PID"], flush=True)
    time.sleep(3600)
"""


def test_killed_sandbox_process_leaves_neither_control_groups_nor_helper_processes(where):
    service = subprocess.Popen([sys.executable, "-c", _SERVICE], stdout=subprocess.PIPE)
    try:
        assert service.stdout is not None
        bait = Path("/proc", service.stdout.readline().decode().strip())
        assert bait.exists() and len(groups_of(service.pid, where)) == 3 * len(where.places)
    finally:
        service.send_signal(signal.SIGKILL)
        service.communicate()
    wait_until(lambda: not bait.exists(), "the helper process has ended")
    wait_until(lambda: not groups_of(service.pid, where), "the control groups are removed")


def test_control_groups_left_by_a_killed_process_are_removed(where):
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    left = [place / f"oubliette-{gone.pid}-0" for place in where.places]
    for group in left:
        group.mkdir()
    control_groups.ControlGroup(where).close()
    assert not [group for group in left if group.exists()]
