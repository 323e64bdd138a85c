"""A process tied to its parent gets a signal when the parent dies, and does not start if the parent is already dead."""

import os
import subprocess
import sys

import pytest

from pipelinerl.system.supervised_process import tied
from tests.patience import PATIENCE_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's tie is Linux's")

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
_PARENT = """
import subprocess, sys, time
from pipelinerl.system.supervised_process import tied
noted, child = sys.argv[1:]
subprocess.Popen(tied([sys.executable, "-c", child, noted], "SIGTERM"))
time.sleep(60)
"""


def test_process_tied_to_its_parent_gets_the_given_signal_when_the_parent_is_killed(tmp_path):
    noted = tmp_path / "noted"
    parent = subprocess.Popen([sys.executable, "-c", _PARENT, str(noted), _CHILD], stdout=subprocess.PIPE)
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
