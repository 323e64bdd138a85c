"""Isolation of each run of a program, applied by the run's own process and the guest's server; for x86_64 only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
from collections.abc import Callable
from typing import Any

# Unlike CDLL, PyDLL holds the interpreter's lock during calls, which a call that forks requires.
_LIBC = ctypes.PyDLL(None, use_errno=True)
syscall = _LIBC.syscall
_CLONE, _PRCTL, _MOUNT, _CAPSET, _PRLIMIT = 56, 157, 165, 126, 302  # system call numbers on x86_64
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_CLONE_PIDFD = 0x1000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 3, 4, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_ALL, _LANDLOCK_READ, _LANDLOCK_READ_FILE = (1 << 13) - 1, 0xC, 0x4
_MNT_DETACH = 2
#: User id of a run inside its namespace.
_INNER_ID = 1000
#: A run's working folder in the guest.
FOLDER = "/tmp"

#: Arguments of a system call that changes nothing, for rehearsals of a run (`program.py`).
NOTHING = (_PRCTL, _PR_GET_DUMPABLE, 0, 0, 0, 0)
#: One step of confining a run: a function and its arguments. It fails by an exception, or by the result -1.
Step = tuple[Callable[..., Any], tuple[Any, ...]]


class GuestIsolation:
    """Creates and confines each run's process in the guest; `settings` are the fields of `Isolation` in `slot.py`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.have_folder = self._namespaces = settings["namespaces"]
        self._outer_id = settings["outer_id"]
        self._shown = [path.encode() for path in settings["shown"]]
        self._version, self._no_rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        self._servers_filter, self._filter = _Filter(settings["servers_filter"]), _Filter(settings["filter"])
        self._trouble, self.trouble_file = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        own = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC if self._namespaces else 0
        self._handle = ctypes.c_int()
        self._forking = (_CLONE, own | _CLONE_PIDFD | signal.SIGCHLD, 0, ctypes.byref(self._handle), 0, 0)
        ids = b"%d %d 1" % (_INNER_ID, self._outer_id)
        self._maps = [(b"setgroups", b"deny"), (b"uid_map", ids), (b"gid_map", ids)] if self._namespaces else []
        if self._namespaces:
            for name in ("sys", "sysrq-trigger", "irq", "bus"):
                # The kernel lets a run mount its own /proc only if nothing is mounted over parts of the server's.
                _LIBC.umount2(f"/proc/{name}".encode(), _MNT_DETACH)

    def fork(self) -> tuple[int, int]:
        """Fork a process into new namespaces; return its pid and a pidfd, or (0, …) in the child."""
        pid = syscall(*self._forking)
        if pid < 0:
            raise _failure("clone")
        return pid, self._handle.value

    def map_ids(self, pid: int) -> None:
        """Map the user and group id of a process inside its namespace to the ids outside."""
        for name, text in self._maps:
            write(b"/proc/%d/%s" % (pid, name), text)

    def processes(self, pid: int) -> list[str]:
        """Return the pids of the run whose first process is `pid`."""
        if not self._namespaces:
            return [str(pid)]
        ours = {"1", str(os.getpid())}
        return [name for name in os.listdir("/proc") if name.isdigit() and name not in ours]

    def trouble(self) -> bytes:
        """Return the error that kept the latest run from starting; b"" if there is none."""
        try:
            return os.read(self._trouble, 4096)
        except BlockingIOError:
            return b""

    def entering(self, limits: dict[str, Any]) -> list[Step]:
        """Return the first calls that a run's process makes: they set its user, folder, /proc and process group."""
        steps: list[Step] = [(os.setsid, ())]  # otherwise the run's signals to its process group would reach the server
        if self._namespaces:
            room = f"size={limits['disk_bytes']},nr_inodes={limits['inodes']},mode=0700"
            steps += [
                (os.setresgid, (_INNER_ID,) * 3),
                (os.setresuid, (_INNER_ID,) * 3),
                (syscall, (_PRCTL, _PR_SET_DUMPABLE, 1, 0, 0, 0)),
                (syscall, _mount(b"tmpfs", FOLDER.encode(), _MS_NOSUID | _MS_NODEV, room.encode())),
                (syscall, _mount(b"proc", b"/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, b"")),
            ]
        elif os.geteuid() == 0:
            steps += [
                (os.setgroups, ([],)),
                (os.setresgid, (self._outer_id,) * 3),
                (os.setresuid, (self._outer_id,) * 3),
            ]
        return [*steps, (os.chdir, (FOLDER if self._namespaces else "/",)), (killed_first, ())]

    def shutting(self, limits: dict[str, Any]) -> list[Step]:
        """Return the last calls before the program: close files, set limits, drop privileges, install the filter."""
        steps: list[Step] = [
            (os.closerange, (3, self.trouble_file)),
            (os.closerange, (self.trouble_file + 1, 1 << 16)),
            *(
                (syscall, (_PRLIMIT, 0, number, struct.pack("=QQ", soft, hard), 0, 0))
                for number, soft, hard in limits["rlimits"]
            ),
            (syscall, (_CAPSET, self._version, self._no_rights, 0, 0, 0)),
            (syscall, (_PRCTL, _PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)),
        ]
        if not self._namespaces:
            steps += [(syscall, (_PRCTL, _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)), (self._hide, ())]
        return [*steps, *self._filter.setting]

    def confine_server(self) -> None:
        """Install the server's filter, which denies calls that neither the server nor any fork needs."""
        take(self._servers_filter.setting)

    def _hide(self) -> None:
        """Restrict the process by Landlock: it can read only the paths in the setting `shown`, and write no file."""
        ruleset = syscall(_LANDLOCK_CREATE, struct.pack("=Q", _LANDLOCK_ALL), 8, 0)
        if ruleset < 0:
            raise _failure("landlock")
        for path in self._shown:
            file = os.open(path, os.O_PATH)
            rights = _LANDLOCK_READ if os.path.isdir(path) else _LANDLOCK_READ_FILE
            if syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, file), 0) != 0:
                raise _failure(f"landlock of {path!r}")
            os.close(file)
        if syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
            raise _failure("landlock")
        os.close(ruleset)


class _Filter:
    """A seccomp program, and `setting`, the list of calls that installs it; the list is empty for an empty program."""

    def __init__(self, encoded: str) -> None:
        steps = bytes.fromhex(encoded)
        self._steps = ctypes.create_string_buffer(steps)
        program = struct.pack("@HP", len(steps) // 8, ctypes.addressof(self._steps))
        self.setting: list[Step] = [(syscall, (_PRCTL, _PR_SET_SECCOMP, 2, program, 0, 0))] if steps else []


def keep_code() -> None:
    """Prepare the memory mappings of the interpreter's code so that forked processes need no page faults to run it.

    At a fork, the kernel copies a mapping's page table only if the mapping has a private page. Writing one byte of each
    mapping, with its old value, gives the mapping such a page.
    """
    with (
        contextlib.suppress(OSError),
        open("/proc/self/maps") as maps,
        open("/proc/self/mem", "r+b", buffering=0) as all_,
    ):
        for line in maps.read().splitlines():
            begin, rights, path = line.partition("-")[0], line.split()[1], line.partition("/")[2]
            if rights in ("r-xp", "r--p") and path.rpartition("/")[2].startswith(("libpython", "python", "libc.so")):
                all_.seek(int(begin, 16))
                first = all_.read(1)
                all_.seek(int(begin, 16))
                all_.write(first)


def give_back_memory() -> None:
    """Return free memory to the kernel, so that forks do not copy it."""
    _LIBC.malloc_trim(0)


def write(path: bytes, text: bytes) -> None:
    """Write `text` in one call, as files in /proc require."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text)
    finally:
        os.close(file)


def killed_first() -> None:
    """Make this process the first to be killed when the machine is out of memory."""
    try:  # noqa: SIM105 - a context manager would cost each run some pages
        write(b"/proc/self/oom_score_adj", b"1000")
    except OSError:
        pass


def _mount(kind: bytes, where: bytes, flags: int, options: bytes) -> tuple[Any, ...]:
    return _MOUNT, kind, where, kind, ctypes.c_ulong(flags), options


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def take(steps: list[Step]) -> None:
    """Make the calls `steps` (function and arguments) in order. Raises `OSError` at the first call that fails."""
    for call, arguments in steps:
        if call(*arguments) == -1:
            raise _failure(f"{call.__name__}{arguments}")
