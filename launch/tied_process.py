"""Run by path, before a process of a run: `python -S -E tied_process.py LAUNCHER_PID CORES -- program argument…`.

It ties the process to its launcher (the kernel kills it when the launcher dies, even by SIGKILL), sets its cores and
becomes the program. Standard library only: it costs each start some milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Tie, pin, become."""
    launcher, cores, _, *argv = sys.argv[1:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(launcher):  # it died before the tie was made
            sys.exit(f"tied_process: launcher {launcher} is gone; not starting {argv[0]}")
        if cores:
            os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"tied_process: {argv[0]} cannot be started: {error.strerror}")


if __name__ == "__main__":
    main()
