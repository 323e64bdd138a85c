"""`Attack`: a program that tries one thing, says `ESCAPED …` where it gets it, and `held` where it is refused it.

None of them does harm where it succeeds: signals are 0, files are the probe's own, floods and bombs end by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipelinerl.verifiers.oubliette.runs import Ending, Limits

#: Of an attack that is refused what it wants; generous, since it does not wait for its limits.
QUICK: Final = Limits(
    cpu_s=20, wall_s=60, memory_bytes=256 << 20, disk_bytes=16 << 20, inodes=512, output_bytes=1 << 20
)
#: Of an attack that never ends by itself.
ENDLESS: Final = Limits(
    cpu_s=0.3, wall_s=0.6, memory_bytes=256 << 20, disk_bytes=16 << 20, inodes=512, output_bytes=1 << 20
)
#: How what loops or sleeps ends.
TIME_IS_UP: Final = frozenset({Ending.CPU_TIME, Ending.DEADLINE, Ending.STARVED})

#: What the programs in Python begin with.
PRELUDE: Final = """\
import ctypes, errno, mmap, os, resource, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def escaped(what): os.write(1, f"ESCAPED {what}\\n".encode())
def held(): os.write(1, b"held\\n")
def refused(call, *arguments, what="it was let through"):
    try: got = call(*arguments)
    except (OSError, ValueError, MemoryError, RuntimeError): return held()
    escaped(f"{what}: {got!r}")
def syscall(number, *arguments):
    ctypes.set_errno(0)
    if libc.syscall(ctypes.c_long(number), *arguments) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return "the kernel did it"
def barred(number, *arguments):
    "The filter has to say no before the kernel looks at the arguments."
    try: syscall(number, *arguments)
    except OSError as error:
        return held() if error.errno in (errno.EPERM, errno.ENOSYS) else escaped(f"the kernel was asked: {error}")
    escaped("the kernel did it")
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One of them.

    Attributes:
        source: the program; `@PID@`, `@FILE@`, `@PORT@`, `@NAME@`, `@WORD@` stand for the probe's baits.
        language: `python`, or one that is compiled, and attacks the compiler or is code that only a compiler makes.
        before: a program that ran just before, in the same slot.
        ends: how it may end without having said `held`.
        needs_namespaces: whether only a tier that has them can hold it off.
        own_kernel: whether a kernel of the sandbox's own may let it do so: it reaches nothing of the host by it.
        at_start: whether it is tried each time that a sandbox is opened.
    """

    name: str
    source: str
    language: str = "python"
    before: str = ""
    limits: Limits = QUICK
    ends: frozenset[Ending] = frozenset()
    at_start: bool = False
    needs_namespaces: bool = False
    own_kernel: bool = False
