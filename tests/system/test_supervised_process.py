"""A supervised program leaves no process behind, and a tied one gets a signal when its parent dies."""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipelinerl.system import supervised_process
from pipelinerl.system.supervised_process import ending_of, tied
from tests.patience import PATIENCE_S, SOON_S, is_running, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="subreapers and ties are Linux's")

#: A program that starts a child in a session of its own and an orphaned grandchild, prints their ids, and then ends.
_PROGRAM = """
import os, subprocess, sys, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in sys.argv else signal.SIG_DFL)
child = subprocess.Popen(["sleep", "600"], start_new_session=True)
orphan = subprocess.check_output(["sh", "-c", "setsid sleep 600 >/dev/null & echo $!"], text=True)
print(child.pid, orphan.strip(), flush=True)
exec(sys.argv[1])
"""
#: A program that runs the command of its arguments, with its own process id in place of the argument 0.
_PARENT = """
import os, subprocess, sys
subprocess.run([str(os.getpid()) if each == "0" else each for each in sys.argv[1:]])
"""


def command(parent, grace_s, *program):
    words = [sys.executable, "-I", "-S", supervised_process.__file__, str(parent), "SIGTERM", "", str(grace_s), "--"]
    return [*words, *program]


def started(last, *more, grace_s=5.0):
    argv = command(os.getpid(), grace_s, sys.executable, "-S", "-c", _PROGRAM, last, *more)
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = [int(word) for word in process.stdout.readline().split()]
    process.stdout.close()
    assert len(pids) == 2
    return process, pids


@pytest.mark.parametrize(
    ("last", "status", "ending"),
    [
        ("sys.exit(3)", 3, "ended with status 3"),
        ("os.kill(os.getpid(), signal.SIGKILL)", -9, "was killed by SIGKILL; the machine may be out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -11, "was killed by SIGSEGV"),
    ],
)
def test_descendants_in_sessions_of_their_own_end_with_a_supervised_program(last, status, ending):
    process, pids = started(last)
    assert process.wait(PATIENCE_S) == status and ending_of(status) == ending
    assert not any(map(is_running, pids))


@pytest.mark.parametrize(("more", "grace_s"), [((), 60.0), (("deaf",), 0.1), (("deaf",), 0.0)])
def test_sigterm_ends_a_supervised_program_and_its_descendants(more, grace_s):
    process, pids = started("time.sleep(600)", *more, grace_s=grace_s)
    began = time.monotonic()
    process.terminate()
    assert process.wait(PATIENCE_S) == (-signal.SIGKILL if more else -signal.SIGTERM)
    assert time.monotonic() - began < SOON_S and not any(map(is_running, pids))


def test_supervised_program_and_its_descendants_end_when_the_parent_is_killed(tmp_path):
    file = tmp_path / "pids"
    program = ["sh", "-c", f"setsid sleep 600 & echo $! $$ > {file}.new; mv {file}.new {file}; sleep 600"]
    with subprocess.Popen([sys.executable, "-c", _PARENT, *command(0, 0.0, *program)]) as parent:
        wait_until(file.exists, "the program has started")
        pids = [int(word) for word in file.read_text().split()]
        parent.kill()
    wait_until(lambda: not any(map(is_running, pids)), "the program and its descendants have ended")


def test_program_that_does_not_exist_is_named_by_the_supervisor():
    argv = command(os.getpid(), 0.0, "/no/such/program")
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1 and "/no/such/program cannot be started" in ended.stderr


# --- tied processes --------------------------------------------------------------------------------------------------

#: A program that writes the signal that it receives to a file.
_CHILD = """
import pathlib, signal, sys, time
def noted(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
    sys.exit()
signal.signal(signal.SIGTERM, noted)
print("ready", flush=True)
time.sleep(60)
"""
_TYING = """
import subprocess, sys, time
from pipelinerl.system.supervised_process import tied
noted, child = sys.argv[1:]
subprocess.Popen(tied([sys.executable, "-c", child, noted], "SIGTERM"))
time.sleep(60)
"""


def test_process_tied_to_its_parent_gets_the_given_signal_when_the_parent_is_killed(tmp_path):
    noted = tmp_path / "noted"
    parent = subprocess.Popen([sys.executable, "-c", _TYING, str(noted), _CHILD], stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        parent.kill()
    wait_until(lambda: noted.exists() and noted.read_text(), "the child has received a signal")
    assert noted.read_text() == "SIGTERM"


@pytest.mark.parametrize(
    ("parent", "program", "reason"),
    [(1, "true", "is gone; not starting true"), (os.getpid(), "/no/such/program", "cannot be started")],
    ids=["parent", "program"],
)
def test_tying_a_process_fails_with_an_error_if_its_parent_or_program_is_missing(parent, program, reason):
    command = [str(parent) if word == str(os.getpid()) else word for word in tied([program])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert reason in ended.stderr


def test_process_tied_to_its_parent_runs_on_the_given_cpu_cores():
    core = min(os.sched_getaffinity(0))
    argv = [sys.executable, "-c", "import os; print(os.sched_getaffinity(0))"]
    assert subprocess.check_output(tied(argv, cores=[core]), text=True, timeout=PATIENCE_S) == f"{{{core}}}\n"
