"""Run by path, before another program: `python -S -E tied_process.py PARENT_PID SIGNAL CORES -- program argument…`.

It ties the process to its parent, sets its cores (`0,1,2`; empty: as they are) and becomes the program. The kernel
sends it `SIGNAL` (a name, like `SIGTERM`) as soon as the parent is gone, even by SIGKILL, so that a run that was killed
leaves no process behind. It is a program of its own since code between fork and exec is unsafe in a process with
threads; standard library only, since it costs each start some milliseconds. Linux only (`prctl(PR_SET_PDEATHSIG)`,
which survives exec); elsewhere the program is merely run. Linux counts the *thread* that started the program as its
parent, so that must be one that lives as long as its process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie, pin, become."""
    parent, ending, cores, _, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.Signals[ending]))
        if os.getppid() != int(parent):  # it died before the tie was made
            sys.exit(f"tied_process: the parent {parent} is gone; not starting {argv[0]}")
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"tied_process: {argv[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
