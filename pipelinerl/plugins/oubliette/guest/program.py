"""The process of a run, which confines itself and then becomes the program.

A Python program is not started by exec: it runs in the forked interpreter. As in a new interpreter, `site` has set up
package paths and names such as `exit`, but has not run the host's .pth files. `__main__` has no names of this project.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import site
import sys
import types
from typing import Any, Literal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pipelinerl.plugins.oubliette.guest import isolation
else:
    import isolation

_FOLDER = isolation.FOLDER
_PROGRAM = f"{_FOLDER}/main.py"
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
#: Modules that many programs import; the server loads them, so that forks need not.
_OFTEN_IMPORTED = ("bisect", "collections", "heapq", "math", "typing")
#: Number of rehearsals of a run after which the interpreter has specialised the bytecode, with a margin.
_REHEARSALS = 12


class RunRequest:
    """A request to run a program, with the system calls by which the run's process confines itself."""

    def __init__(self, settings: dict[str, Any], around: isolation.GuestIsolation | _NoIsolation) -> None:
        self.limits: dict[str, Any] = settings["limits"]
        self.python: str = settings["python"]
        self.argv: list[str] = settings["argv"]
        self.arguments: list[str] = settings["arguments"]
        self.environment: dict[str, str] = settings["environment"]
        self.paths = [f"{_FOLDER}/{name}" for name in settings["files"]] if around.have_folder else []
        self.entering = around.entering(self.limits)
        self.shutting = around.shutting(self.limits)


def become(request: RunRequest, files: list[int], go_read: int, trouble: int) -> None:
    """Confine this process and run the program in it; never return. Write errors of confining to `trouble`."""
    try:
        if os.read(go_read, 1) != b"g":
            os._exit(1)
        source = _enter(request, files)
        if request.python:
            os.close(trouble)
    except BaseException as error:  # this process must never continue as the server
        with contextlib.suppress(OSError):
            os.write(trouble, f"{type(error).__name__}: {error}".encode())
        os._exit(1)
    if request.python:
        os._exit(_be_python(source, request.python, request.arguments))
    try:
        os.execve(request.argv[0], request.argv, request.environment)
    except BaseException as error:  # for example, because the compiler's output is not executable
        os.write(2, f"{request.argv[0]}: {error}\n".encode())
        os._exit(126)


def _enter(request: RunRequest, files: list[int]) -> bytes:
    """Set up the run's folder, limits, privileges and files; return the source if it is a Python program, else b""."""
    isolation.take(request.entering)
    for path, file in zip(request.paths, files[3:], strict=False):
        _copy(file, os.open(path, _NEW_FILE, 0o700))
    source = os.pread(files[3], os.lseek(files[3], 0, os.SEEK_END), 0) if request.python else b""
    for number, file in enumerate(files[:3]):
        os.dup2(file, number)
    isolation.take(request.shutting)
    return source


def _copy(source: int, target: int) -> None:
    """Copy a whole file without moving its file position, which other processes that read the file may share."""
    offset = 0
    while sent := os.sendfile(target, source, offset, 1 << 30):
        offset += sent
    os.close(target)


def be_ready() -> None:
    """Prepare everything that forks need, and run a sample program, so that forks need no first-time work."""
    os.environ.pop("LD_BIND_NOW", None)  # was set for the server, not for programs
    sys.set_int_max_str_digits(0)  # the limit protects servers; a program's processor time is limited anyway
    for name in _OFTEN_IMPORTED:
        __import__(name)
    # Set up package paths, `exit` and similar names, without .pth files, which would slow down each fork.
    site.setquit()
    site.setcopyright()
    site.sethelper()
    sys.path[:0] = [_FOLDER]
    sys.path += [folder for folder in site.getsitepackages() if os.path.isdir(folder)]
    _rehearse()
    _be_ready_for_a_program()


def _be_python(source: bytes, name: str, arguments: list[str]) -> int:
    """Run a program as `python name` would, in this interpreter; return its exit status."""
    gc.enable()
    if name != _PROGRAM or arguments:
        sys.argv, sys.path[0], sys.modules["__main__"].__file__ = [name, *arguments], os.path.dirname(name), name
    code = 0
    try:
        exec(compile(source, name, "exec", dont_inherit=True), vars(sys.modules["__main__"]))
    except SystemExit as ending:
        if ending.code is None or isinstance(ending.code, int):
            code = (ending.code or 0) & 0xFF
        else:
            code = 1
            print(ending.code, file=sys.stderr)
    except BaseException as error:
        code = 1
        trace = error.__traceback__ and error.__traceback__.tb_next  # omit the frame of this file
        with contextlib.suppress(BaseException):
            sys.excepthook(type(error), error.with_traceback(trace), trace)
    return _finished(code)


def _be_ready_for_a_program() -> None:
    sys.stdin, sys.stdout, sys.stderr = _warm_streams()
    vars(sys).update(__stdin__=sys.stdin, __stdout__=sys.stdout, __stderr__=sys.stderr)
    sys.argv = [_PROGRAM]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    main.__file__ = _PROGRAM


#: A sample program with operations that most programs use.
_REHEARSED = b"""
import sys
from collections import deque
n, *rest = map(int, input().split())
lines = [sys.stdin.readline().strip() for _ in range(1)]
def f(a, b=1): return {a: [b, *rest]}
class C:
    def __init__(self, x): self.x = x
for i in range(n): print(C(f(i)).x, sum(rest), sorted(rest), f"{i} {n / 2:.3f}", sep=" ", end="\\n")
try: rest[9]
except IndexError as error: print("x".join(map(str, deque([error]))), file=sys.stderr)
sys.stdout.write(sys.stdin.read())
exit(0)
"""


class _NoIsolation:
    """Replacement for the isolation in a rehearsal; it makes similar system calls that change nothing."""

    have_folder = False

    def entering(self, _: dict[str, Any]) -> list[isolation.Step]:
        return [
            (os.chdir, ("/",)),
            (isolation.syscall, isolation.NOTHING),
            (isolation.write, (b"/dev/null", b"1000")),
            (isolation.killed_first, ()),
        ]

    def shutting(self, _: dict[str, Any]) -> list[isolation.Step]:
        return self.entering({})


def _rehearse() -> None:
    """Run a sample program as a real run would, but without the system calls that would change this process."""
    kept = [os.dup(number) for number in range(3)]
    settings = {"limits": {}, "python": _PROGRAM, "argv": [], "arguments": [], "environment": {}, "files": []}
    request = RunRequest(settings, _NoIsolation())
    files = [os.memfd_create("rehearsal") for _ in range(5)]
    for _ in range(_REHEARSALS):
        for file, content in zip(files, (b"2 3 4\n5\n6\n", b"", b"", _REHEARSED, b""), strict=True):
            os.ftruncate(file, 0)
            os.pwrite(file, content, 0)
            os.lseek(file, 0, os.SEEK_SET)
        _be_ready_for_a_program()
        _copy(files[3], os.dup(files[4]))
        _be_python(_enter(request, files[:4]), _PROGRAM, [])
    for number, file in enumerate(kept):
        os.dup2(file, number)
    for file in (*kept, *files):
        os.close(file)


_Streams = tuple[io.TextIOWrapper, io.TextIOWrapper, io.TextIOWrapper]


def _warm_streams() -> _Streams:
    """Create a program's standard streams, as Python would for file descriptors 0, 1 and 2.

    They are created over a memory file and pipes, as in runs, since Python inspects the files.
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
    stream = open(number, mode, closefd=False)  # noqa: SIM115 - open as long as the program runs
    return io.TextIOWrapper(stream, encoding="utf-8", errors=errors)


def _finished(code: int) -> int:
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:
        code = code or 120
    try:  # noqa: SIM105 - a context manager would cost each run some pages
        sys.stderr.flush()
    except BaseException:
        pass
    return code
