"""A process exits with its main function's status even if threads are busy; output is flushed, exit functions run."""

import subprocess
import sys

import pytest

from tests.patience import PATIENCE_S

#: A program with a thread that keeps calling torch's C++ code, so that it may return to Python during the exit.
BUSY = """
import atexit, sys, threading, time, torch
from concurrent.futures import ThreadPoolExecutor
from pipelinerl.system.process import run_process
weights, begun = torch.ones(512, 512), threading.Event()
def work():
    while True:
        weights @ weights
        begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
atexit.register(print, "registered")
pool = ThreadPoolExecutor(1)
pool.submit(lambda: (time.sleep(0.2), print("written", end=" ")))
def main():
    print("said", end=" ")
    sys.exit(143)
"""
QUIET = "import sys\nfrom pipelinerl.system.process import run_process\n"


def ended(program):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    return done.returncode, done.stdout, done.stderr


def test_thread_in_native_code_does_not_abort_the_exit_of_its_process():
    assert ended(f"{BUSY}run_process(main)") == (143, "said written registered\n", "")


@pytest.mark.parametrize(
    ("main", "status", "message"),
    [
        ("lambda: None", 0, ""),
        ("lambda: sys.exit(2)", 2, ""),
        ("lambda: sys.exit('a sentence')", 1, "a sentence\n"),
        ("lambda: 1 / 0", 1, "ZeroDivisionError: division by zero\n"),
    ],
)
def test_process_without_busy_threads_exits_with_the_status_of_its_main_function(main, status, message):
    returncode, _, error = ended(f"{QUIET}run_process({main})")
    assert returncode == status and error.endswith(message) and bool(error) == bool(message)
