"""Wrapper that ties a process to its parent and then becomes another program.

    python -S -E tied_process.py PARENT_PID SIGNAL CORES -- program argument…

It sets the process's cores (`0,1,2`; empty: unchanged), ties the process to its parent, and becomes the program. When
the parent ends, even by SIGKILL, the kernel sends `SIGNAL` (a name, like `SIGTERM`) to the program, so a killed run
leaves no processes behind.

This is a separate program, since code between fork and exec is unsafe in a process with threads. It imports only the
standard library, to start within milliseconds. On systems other than Linux (`prctl(PR_SET_PDEATHSIG)`, which survives
exec) it only runs the program. Linux considers the *thread* that started the program as its parent, so this thread must
live as long as the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie this process to its parent, set its cores, and execute the program."""
    parent, ending, cores, _, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(signal.Signals[ending]))
        if os.getppid() != int(parent):  # the parent died before prctl
            sys.exit(f"tied_process: the parent {parent} is gone; not starting {argv[0]}")
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"tied_process: {argv[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
