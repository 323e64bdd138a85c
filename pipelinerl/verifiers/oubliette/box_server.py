"""Runs inside a slot's box: `python3 -I -S box_server.py`. Forks each run into a box of its own; standard library only.

Over its standard input, a seqpacket socket, comes a request a packet, with open files beside it: standard input, output
and error of the run, then the files to be laid into its folder. For each it makes one process, which is the first of
new namespaces (`Walls`), takes every limit and the system call filter upon itself, and only then becomes the program.
When that process is gone the kernel has ended whatever it had started, so one wait is the end of the run; ending it
early is one SIGKILL. The answer is one packet.

This process never holds what a run reads or writes: a run is a fork of it, and could read that of those before.
A program in Python is not executed anew, it goes on in the fork, which has what `site` would make, but for what the
host's .pth files would run, and nothing else of ours in `__main__`. When the socket closes, because whoever asked is
gone, the run is killed and this process ends.

    waits for          at most            who unblocks it
    a request          for ever           the socket: a packet, or its end
    the end of a run   its deadline       the program, the tick that looks at its memory, "kill", the socket's end
"""

from __future__ import annotations

import array
import atexit
import contextlib
import ctypes
import gc
import io
import json
import os
import resource
import select
import signal
import site
import socket
import struct
import sys
import time
import types
from collections.abc import Callable
from typing import Any, Literal

_LIBC = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock across a fork
_syscall, _prctl, _mounting = _LIBC.syscall, _LIBC.prctl, _LIBC.mount  # looked up here, and not in each run
_NUMBERS = {"x86_64": (56, 126), "aarch64": (220, 91)}  # clone, capset
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID = 0x20000, 0x8000000, 0x10000000, 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 2, 4, 8
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_LANDLOCK_ALL, _LANDLOCK_READ, _LANDLOCK_READ_FILE = (1 << 13) - 1, 0xC, 0x4
_MNT_DETACH = 2
#: How often the memory of a run is added up; and where its control group bounds it, too, the processor time alone.
_TICK_S = 0.02
_SELDOM_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOST_PACKET = 1 << 16
_MOST_FILES = 16
#: The id that a run has in its own eyes.
_INNER_ID = 1000
_FOLDER = "/tmp"


def main() -> None:
    """Answer requests until the socket ends."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    packet, files = _receive(control)
    walls = _Walls(json.loads(packet))
    meter = _Meter(files[0] if files else None)
    _make_site()
    streams = _warm_streams()
    gc.collect()
    gc.freeze()
    gc.disable()  # each run enables it for itself; a page that is never written to here is never copied for a run
    control.send(json.dumps({"ready": os.getpid(), "python": sys.version.split()[0]}).encode())
    while True:
        packet, files = _receive(control)
        if not packet:
            return
        request = json.loads(packet)
        if "files" not in request:
            continue  # "kill", which came when the run had ended by itself
        answer = _run(control, walls, meter, streams, request, files)
        if answer is None:
            return
        control.send(json.dumps(answer).encode())


def _make_site() -> None:
    """Where packages are, and `exit` and its like; what .pth files run makes each fork dearer, and is not a run's."""
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path += [folder for folder in site.getsitepackages() if os.path.isdir(folder)]
    exec(compile("for _ in range(2): (lambda: 1)()", "rehearsal", "exec", dont_inherit=True), {})  # the first is dear


def _receive(control: socket.socket) -> tuple[bytes, list[int]]:
    files = array.array("i")
    packet, extra, _, _ = control.recvmsg(_MOST_PACKET, socket.CMSG_LEN(_MOST_FILES * files.itemsize))
    for level, kind, data in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            files.frombytes(data[: len(data) - len(data) % files.itemsize])
    return packet, list(files)


# --- a run, seen from outside ---------------------------------------------------------------------------------------


def _run(
    control: socket.socket,
    walls: _Walls,
    meter: _Meter,
    streams: _Streams,
    request: dict[str, Any],
    files: list[int],
) -> dict[str, Any] | None:
    """Start, watch, reap. None: whoever asked is gone."""
    limits = request["limits"]
    go_read, go_write = os.pipe()
    trouble_read, trouble_write = os.pipe()
    began = time.monotonic()
    meter.begin()
    pid = walls.fork()
    if pid == 0:
        for file in (go_write, trouble_read, control.fileno()):
            os.close(file)
        _become(walls, streams, request, files, go_read, trouble_write)
    os.close(go_read)
    os.close(trouble_write)
    for file in files:
        os.close(file)
    handle = os.pidfd_open(pid)
    try:
        walls.map_ids(pid)
        os.write(go_write, b"g")
        ended = _watch(control, handle, walls.processes(pid), meter, limits, began)
    except OSError as error:
        ended = f"{error}"
    os.close(go_write)
    delayed_s = _delayed_s(walls.processes(pid)()) if ended else 0.0
    if ended:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    _, status, used = os.wait4(pid, 0)
    os.close(handle)
    trouble = os.read(trouble_read, 4096).decode()
    os.close(trouble_read)
    if ended == "gone":
        return None
    return {
        "code": os.waitstatus_to_exitcode(status),
        "ended": ended,
        "trouble": trouble,
        "cpu_s": meter.cpu_s(used.ru_utime + used.ru_stime),
        "wall_s": time.monotonic() - began,
        "delayed_s": delayed_s,
        "peak_bytes": used.ru_maxrss << 10,
    }


def _watch(
    control: socket.socket,
    handle: int,
    processes: Callable[[], list[str]],
    meter: _Meter,
    limits: dict[str, Any],
    began: float,
) -> str:
    """Wait for the end of a run; why it has to be ended, or nothing where it has ended by itself."""
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.register(control, select.POLLIN)
    until, look = began + limits["wall_s"], began + _SELDOM_S
    while True:
        left_s = until - time.monotonic()
        if left_s <= 0:  # the time that it was ready, and had no processor, is not its own
            until = began + min(limits["wall_s"] + _delayed_s(processes()), limits["starved_s"])
            if until <= time.monotonic() + _TICK_S:
                return "deadline"
            continue
        ready = dict(poll.poll(1000 * min(left_s, _TICK_S)))
        if handle in ready:
            return ""
        if control.fileno() in ready:
            packet, files = _receive(control)
            for file in files:
                os.close(file)
            return "output" if packet else "gone"
        memory_bytes, cpu_s = 0, 0.0
        if not meter.counts or time.monotonic() >= look:
            memory_bytes, cpu_s = _used(processes())
            look = time.monotonic() + _SELDOM_S
        cpu_s = meter.cpu_s(cpu_s)
        if memory_bytes > limits["memory_bytes"]:
            return "memory"
        if cpu_s > limits["cpu_s"]:
            return "cpu time"


class _Meter:
    """Processor time of all that runs in the slot, this process apart, by its control group; if it has one."""

    def __init__(self, file: int | None) -> None:
        self._file = file
        self._began_s = 0.0

    @property
    def counts(self) -> bool:
        """Is there a group?"""
        return self._file is not None

    def begin(self) -> None:
        """A run begins now."""
        self._began_s = self._taken_s()

    def cpu_s(self, otherwise: float) -> float:
        """Seconds since it has; `otherwise` without a group."""
        return otherwise if self._file is None else max(0.0, self._taken_s() - self._began_s)

    def _taken_s(self) -> float:
        if self._file is None:
            return 0.0
        text = os.pread(self._file, 256, 0)
        taken_s = int(text.split()[1]) / 1e6 if text.startswith(b"usage_usec") else int(text) / 1e9
        return taken_s - time.process_time()


def _used(processes: list[str]) -> tuple[int, float]:
    """(bytes apart from files, processor seconds) of the processes of the run, together."""
    memory_bytes = ticks = 0
    for name in processes:
        with contextlib.suppress(OSError):  # it has ended
            with open(f"/proc/{name}/stat", "rb") as file:
                ticks += sum(int(field) for field in file.read().rpartition(b")")[2].split()[11:15])
            with open(f"/proc/{name}/status", "rb") as file:
                for line in file:
                    if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                        memory_bytes += int(line.split()[1]) << 10
    return memory_bytes, ticks / _TICKS_PER_S


def _delayed_s(processes: list[str]) -> float:
    """How long the threads of the run were ready, and had no processor: of one thread, the longest."""
    longest = 0
    for name in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in os.listdir(f"/proc/{name}/task"):
                with open(f"/proc/{name}/task/{thread}/schedstat") as file:
                    longest = max(longest, int(file.read().split()[1]))
    return longest / 1e9


# --- a run, from within: nothing below returns ----------------------------------------------------------------------


def _become(
    walls: _Walls, streams: _Streams, request: dict[str, Any], files: list[int], go_read: int, trouble: int
) -> None:
    """Take the limits, lose every right, and be the program. `trouble` is told what hinders that, and then closed."""
    try:
        if os.read(go_read, 1) != b"g":
            os._exit(1)
        os.close(go_read)
        walls.enter(request["limits"])
        for name, file in zip(request["files"], files[3:], strict=True):
            walls.lay(name, file)
        source = _content(files[3]) if request["python"] else None
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        trouble = os.dup2(trouble, 3, inheritable=False)
        os.closerange(4, 1 << 16)
        walls.shut(request["limits"])
    except BaseException as error:  # of a process that must not go on as the server
        with contextlib.suppress(OSError):
            os.write(trouble, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    if source is not None:
        os.close(3)
        _be_python(source, streams, request["python"], request["arguments"])
    try:
        os.execve(request["argv"][0], request["argv"], request["environment"])
    except BaseException as error:  # what was compiled is no program
        os.write(2, f"{request['argv'][0]}: {error}\n".encode())
        os._exit(126)


def _content(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


def _be_python(source: bytes, streams: _Streams, name: str, arguments: list[str]) -> None:
    """Run a program as `python name` would, without starting an interpreter."""
    gc.enable()
    sys.stdin, sys.stdout, sys.stderr = streams
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv, sys.path[:0] = [name, *arguments], [os.path.dirname(name)]
    module = types.ModuleType("__main__")
    module.__file__ = name
    sys.modules["__main__"] = module
    code = 0
    try:
        exec(compile(source, name, "exec", dont_inherit=True), module.__dict__)
    except SystemExit as ending:
        code = _exit_code(ending)
    except BaseException as error:
        code = 1
        _print_traceback(error)
    os._exit(_finished(code))


_Streams = tuple[io.TextIOWrapper, io.TextIOWrapper, io.TextIOWrapper]


def _warm_streams() -> _Streams:
    """A program's standard streams, as Python would make them of 0, 1 and 2.

    Made once, over files of the kinds that runs have there (memory, pipes), since making them looks at that; nothing
    is read or written before a run has put its own files in their places.
    """
    kept = [os.dup(number) for number in range(3)]
    memory, pipe = os.memfd_create("empty"), os.pipe()
    for number, file in enumerate((memory, pipe[1], pipe[1])):
        os.dup2(file, number)
    streams = (
        _text(0, "rb", "surrogateescape"), _text(1, "wb", "surrogateescape"), _text(2, "wb", "backslashreplace")
    )  # fmt: skip
    streams[2].reconfigure(line_buffering=True)
    for number, file in enumerate(kept):
        os.dup2(file, number)
    for file in (*kept, memory, *pipe):
        os.close(file)
    return streams


def _text(number: int, mode: Literal["rb", "wb"], errors: str) -> io.TextIOWrapper:
    stream = open(number, mode, closefd=False)  # noqa: SIM115 - it is open as long as the program runs
    return io.TextIOWrapper(stream, encoding="utf-8", errors=errors)


def _print_traceback(error: BaseException) -> None:
    trace = error.__traceback__ and error.__traceback__.tb_next  # without this file's own frame
    with contextlib.suppress(BaseException):
        sys.excepthook(type(error), error.with_traceback(trace), trace)


def _exit_code(ending: SystemExit) -> int:
    if ending.code is None:
        return 0
    if isinstance(ending.code, int):
        return ending.code & 0xFF
    print(ending.code, file=sys.stderr)
    return 1


def _finished(code: int) -> int:
    """Wait for threads, run what the program has registered, write what it has printed."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 120
    try:
        sys.stderr.flush()
    except BaseException:
        return code
    return code


class _Walls:
    """What stands around each run; `settings` are `Walls` in `sandbox.py`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._namespaces = settings["namespaces"]
        self._outer_id = settings["outer_id"]
        self._shown = [path.encode() for path in settings["shown"]]
        self._clone, self._capset = _NUMBERS[os.uname().machine]
        self._version, self._no_rights = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
        steps = bytes.fromhex(settings["filter"])
        self._steps = ctypes.create_string_buffer(steps)
        self._filter = struct.pack("@HP", len(steps) // 8, ctypes.addressof(self._steps)) if steps else b""
        if self._namespaces:
            for name in ("sys", "sysrq-trigger", "irq", "bus"):  # a covered /proc allows no fresh one below it
                _LIBC.umount2(f"/proc/{name}".encode(), _MNT_DETACH)

    def fork(self) -> int:
        """A new process, the first of its namespaces."""
        flags = _CLONE_NEWUSER | _CLONE_NEWPID | _CLONE_NEWNS | _CLONE_NEWIPC if self._namespaces else 0
        pid = _syscall(self._clone, flags | signal.SIGCHLD, 0, 0, 0, 0)
        if pid < 0:
            raise _failure("clone")
        return pid

    def map_ids(self, pid: int) -> None:
        """Say who the process is outside."""
        if not self._namespaces:
            return
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{_INNER_ID} {self._outer_id} 1"),
            ("gid_map", f"{_INNER_ID} {self._outer_id} 1"),
        ):
            _write(f"/proc/{pid}/{name}", text)

    def processes(self, pid: int) -> Callable[[], list[str]]:
        """Those of the run: all there are but this one, and the box's first; or the only one that it may be."""
        if not self._namespaces:
            return lambda: [str(pid)]
        ours = {"1", str(os.getpid())}
        return lambda: [name for name in os.listdir("/proc") if name.isdigit() and name not in ours]

    def enter(self, limits: dict[str, Any]) -> None:
        """Be who one is; with a folder, a /proc and a process group that nobody else has."""
        os.setsid()  # a signal to its own group reaches across namespaces
        if self._namespaces:
            os.setresgid(_INNER_ID, _INNER_ID, _INNER_ID)
            os.setresuid(_INNER_ID, _INNER_ID, _INNER_ID)
            _prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)
            room = f"size={limits['disk_bytes']},nr_inodes={limits['inodes']},mode=0700"
            _mount("tmpfs", _FOLDER, _MS_NOSUID | _MS_NODEV, room)
            _mount("proc", "/proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "")
        elif os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(self._outer_id, self._outer_id, self._outer_id)
            os.setresuid(self._outer_id, self._outer_id, self._outer_id)
        os.chdir(_FOLDER if self._namespaces else "/")
        with contextlib.suppress(OSError):
            _write("/proc/self/oom_score_adj", "1000")

    def lay(self, name: str, source: int) -> None:
        """Copy a file into the run's folder, if it has one; with an offset of its own, since others may read it."""
        if not self._namespaces:
            return
        target = os.open(f"{_FOLDER}/{name}", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o700)
        offset, size = 0, os.fstat(source).st_size
        while offset < size:
            offset += os.sendfile(target, source, offset, size - offset)
        os.close(target)

    def shut(self, limits: dict[str, Any]) -> None:
        """From here on there are limits, no rights, and fewer system calls."""
        for number, soft, hard in limits["rlimits"]:
            resource.setrlimit(number, (soft, hard))
        if _syscall(self._capset, self._version, self._no_rights) != 0:
            raise _failure("capset")
        if _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise _failure("no_new_privs")
        if not self._namespaces:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            self._hide()
        if self._filter and _prctl(_PR_SET_SECCOMP, 2, self._filter, 0, 0) != 0:
            raise _failure("seccomp")

    def _hide(self) -> None:
        """Landlock: read what is shown, and do nothing else with any file."""
        ruleset = _syscall(_LANDLOCK_CREATE, struct.pack("=Q", _LANDLOCK_ALL), 8, 0)
        if ruleset < 0:
            raise _failure("landlock")
        for path in self._shown:
            file = os.open(path, os.O_PATH)
            rights = _LANDLOCK_READ if os.path.isdir(path) else _LANDLOCK_READ_FILE
            if _syscall(_LANDLOCK_ADD, ruleset, 1, struct.pack("=Qi", rights, file), 0) != 0:
                raise _failure(f"landlock of {path!r}")
            os.close(file)
        if _syscall(_LANDLOCK_RESTRICT, ruleset, 0) != 0:
            raise _failure("landlock")
        os.close(ruleset)


def _write(path: str, text: str) -> None:
    """In one call, as files of /proc want it."""
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def _mount(kind: str, where: str, flags: int, options: str) -> None:
    if _mounting(kind.encode(), where.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
        raise _failure(f"mount of {kind} at {where}")


def _failure(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
