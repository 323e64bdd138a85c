"""Wrapper that runs a program, and kills all of its descendants when it ends, also those in sessions of their own.

    python -S -E supervised_process.py PARENT_PID GRACE_S -- program argument…

The wrapper stays the program's parent and ends with the program's status: a program that a signal killed ends the
wrapper by the same signal. On SIGTERM, or when the process PARENT_PID ends, the program's process group gets SIGTERM,
and after GRACE_S seconds every descendant gets SIGKILL (at once if GRACE_S is 0). Kill a wrapper by SIGTERM only:
SIGKILL would end it before it could kill the descendants.

Linux gives orphans to the nearest subreaper (`PR_SET_CHILD_SUBREAPER`), so no descendant can leave the wrapper. On
other systems the wrapper only becomes the program. Like `tied_process.py` it imports only the standard library, to
start within milliseconds, and the thread that started it must live as long as the program.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
#: Longest time in seconds for which killed descendants are awaited.
_LONGEST_END_S = 30.0
_LOOK_S = 0.002


def main() -> None:
    """Run the program, kill what it leaves behind, and end with its status."""
    parent, grace_s, _, *argv = sys.argv[1:]
    if sys.platform != "linux":
        _become(argv)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != int(parent):  # the parent died before prctl
        sys.exit(f"supervised_process: the parent {parent} is gone; not starting {argv[0]}")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    own, program = os.getpid(), os.fork()
    if program == 0:
        libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
        os.setpgid(0, 0)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        if os.getppid() != own:
            os._exit(1)
        _become(argv)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # otherwise the wrapper keeps the program's connection open
    _end(_awaited(program, float(grace_s)))


def supervised(command: Sequence[str], *, grace_s: float = 0.0) -> list[str]:
    """Return the command line that runs `command` under a wrapper, tied to this process. End it by SIGTERM."""
    return [sys.executable, "-S", "-E", __file__, str(os.getpid()), str(grace_s), "--", *command]


def ending_of(status: int) -> str:
    """Describe the end of a process by its return code, which is negative for a signal as in `subprocess`."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    hint = "; the machine may be out of memory" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}"


def descendants(pid: int) -> list[int]:
    """Return the ids of a process's descendants, without those that became orphans; empty if /proc is missing."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # the process has ended
            children.setdefault(parent, []).append(int(name))
    found = [pid]
    for each in found:
        found += children.get(each, ())
    return found[1:]


def kill_all(pids: list[int]) -> None:
    """Send SIGKILL to the processes that still exist."""
    for pid in pids:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _become(argv: list[str]) -> NoReturn:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        sys.exit(f"supervised_process: {argv[0]} cannot be started: {error.strerror}")


def _awaited(program: int, grace_s: float) -> int:
    """Wait until the program has ended and its descendants are killed; return the program's wait status."""

    def late(*_: object) -> None:
        kill_all(descendants(os.getpid()))

    def end(*_: object) -> None:
        if grace_s <= 0:
            late()
            return
        with suppress(OSError):  # the program may have just ended
            os.killpg(program, signal.SIGTERM)
        signal.setitimer(signal.ITIMER_REAL, grace_s)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, which gets it too, decides when the program ends
    signal.signal(signal.SIGALRM, late)
    signal.signal(signal.SIGTERM, end)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == program:
            break
    until = time.monotonic() + _LONGEST_END_S
    with suppress(ChildProcessError):  # raised when no child is left
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:  # a child still runs
                late()
                time.sleep(_LOOK_S)
    return status


def _end(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    main()
