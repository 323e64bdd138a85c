"""Wrappers that tie a program to its parent, so that no process is left behind when a process is killed.

    python -I -S supervised_process.py PARENT_PID SIGNAL CORES GRACE_S -- program argument…

When the process PARENT_PID ends, even by SIGKILL, the kernel sends SIGNAL (a name, such as SIGTERM) to the wrapper. The
program runs on CORES (`0,1,2`; empty: unchanged).

If GRACE_S is empty, the wrapper becomes the program, which thus gets the signal (`tied`). Otherwise the wrapper stays
the program's parent and ends with the program's status (`supervised`): a program that a signal killed ends the wrapper
by the same signal. On SIGTERM, the program's process group gets SIGTERM, and after GRACE_S seconds every descendant,
also those in sessions of their own, gets SIGKILL (at once if GRACE_S is 0). Kill such a wrapper by SIGTERM only:
SIGKILL would end it before it could kill the descendants.

Linux gives orphans to the nearest subreaper (`PR_SET_CHILD_SUBREAPER`), so no descendant can leave the wrapper. On
other systems the wrapper only becomes the program. It is a separate program, since code between fork and exec is unsafe
in a process with threads, and imports only the standard library, to start within milliseconds. Linux considers the
*thread* that started it as its parent, so this thread must live as long as the program.
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
#: Options of Python: isolated from the environment and without installed packages, to start fast.
_OPTIONS = ("-I", "-S", __file__)


def main() -> None:
    """Tie this process to its parent, and run the program."""
    parent, ending, cores, grace_s, _, *argv = sys.argv[1:]
    if sys.platform != "linux":
        _become(argv)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, int(signal.Signals[ending]))
    if os.getppid() != int(parent):  # the parent died before prctl
        sys.exit(f"supervised_process: the parent {parent} is gone; not starting {argv[0]}")
    if cores:
        os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    if not grace_s:
        _become(argv)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)
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
    status = _awaited(program, float(grace_s))
    if os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        time.sleep(1)
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


def tied(
    command: Sequence[str], ending: str = "SIGKILL", *, cores: Sequence[int] = (), python: str = sys.executable
) -> list[str]:
    """Return the command line of a program that gets the signal `ending` when this process ends."""
    return [python, *_OPTIONS, str(os.getpid()), ending, ",".join(map(str, cores)), "", "--", *command]


def supervised(command: Sequence[str], *, grace_s: float = 0.0) -> list[str]:
    """Return the command line that runs `command` under a wrapper, tied to this process. End it by SIGTERM."""
    return [sys.executable, *_OPTIONS, str(os.getpid()), "SIGTERM", "", str(grace_s), "--", *command]


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


if __name__ == "__main__":
    main()
