"""Becomes another program that ends when its parent does: `python exec_with_parent.py PARENT_PID PROGRAM ARGUMENT…`.

It promises that the program gets SIGTERM as soon as its parent is gone, however the parent ended, so that a run that
was killed leaves no server behind. Run as a program of its own, since code between fork and exec is unsafe in a process
with threads. Linux only (`prctl(PR_SET_PDEATHSIG)`, which survives exec); elsewhere the program is merely run. Linux
counts the *thread* that started the program as its parent, so that must be one that lives as long as its process.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, program: list[str]) -> None:
    """Ask for the signal, make sure that the parent was still there, become the program."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
        if os.getppid() != parent:
            sys.exit(f"the parent {parent} of {program[0]} has already ended")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
