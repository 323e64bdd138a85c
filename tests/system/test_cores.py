"""Moves of a process between its own cores and those that it shares in turn, and the cores' busy seconds."""

import os
import threading

import pytest

from pipelinerl.system import cores, secret_variables
from pipelinerl.system.cores import ComputeCores, busy_seconds, usable_cores

SET = []


def set_threads(count):
    SET.append((count, threading.get_ident()))


@pytest.fixture
def here():
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    yield sorted(before)
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), before)


def test_all_threads_of_a_process_move_between_its_own_core_and_the_shared_ones(here, monkeypatch):
    monkeypatch.setitem(secret_variables._withheld, cores.VARIABLE, f"{here[1]}")  # as in a role's process
    other, stop = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (other.set(), stop.wait(30)))
    thread.start()
    try:
        other.wait(30)
        own = ComputeCores(f"{__name__}:set_threads", threads=1)
        assert usable_cores() == tuple(here), "nothing moves yet"
        for shared, expected, count in (((), {here[1]}, 1), (here[:2], set(here[:2]), 2), ((), {here[1]}, 1)):
            own.use(shared)
            assert {frozenset(os.sched_getaffinity(each)) for each in (0, thread.native_id)} == {frozenset(expected)}
            assert SET[-1] == (count, threading.get_ident())
    finally:
        stop.set()
        thread.join(30)


def test_process_without_cores_of_its_own_stays_where_it_is(here, monkeypatch):
    monkeypatch.delenv(cores.VARIABLE, raising=False)
    ComputeCores(f"{__name__}:set_threads", threads=3).use(())
    assert usable_cores() == tuple(here)
    assert SET[-1][0] == 3


def test_busy_seconds_count_the_given_cores_without_their_idle_time(tmp_path):
    assert busy_seconds([0], tmp_path) is None
    ticks = os.sysconf("SC_CLK_TCK")
    lines = ["cpu 9 9 9 9 9 9 9 9 9 9"]
    lines += [f"cpu{core} {ticks * core} 0 {ticks} 999 999 0 0 {ticks} 5 0" for core in range(3)]
    (tmp_path / "stat").write_text("\n".join([*lines, "intr 5"]))
    assert busy_seconds([1, 2], tmp_path) == pytest.approx(3 + 4)
