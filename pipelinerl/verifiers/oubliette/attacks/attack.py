"""`Attack`: a program that tries to break out. It prints `ESCAPED …` if it succeeds, or `held` if the sandbox refuses
it.

No attack does harm if it succeeds: signals are 0, files belong to the probe, floods and bombs end by themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pipelinerl.verifiers.oubliette.runs import Ending, Limits

#: Limits of attacks that a sandbox refuses at once; generous, since such attacks do not test limits.
QUICK: Final = Limits(
    cpu_s=20, wall_s=60, memory_bytes=256 << 20, disk_bytes=16 << 20, inodes=512, output_bytes=1 << 20
)
#: Limits of attacks that never end by themselves.
ENDLESS: Final = Limits(
    cpu_s=0.3, wall_s=0.6, memory_bytes=256 << 20, disk_bytes=16 << 20, inodes=512, output_bytes=1 << 20
)
#: Possible endings of programs that loop or sleep.
TIME_IS_UP: Final = frozenset({Ending.CPU_TIME, Ending.DEADLINE, Ending.STARVED})

#: Preamble of the Python programs.
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
    """One attack.

    Attributes:
        source: the program. The probe replaces `@PID@`, `@FILE@`, `@PORT@`, `@NAME@`, `@WORD@` by its baits.
        language: `python`, or a compiled language; the latter attacks the compiler, or needs native code.
        before: a program that runs just before, in the same slot.
        ends: endings that show that the sandbox held, even if the program did not print `held`.
        needs_namespaces: whether only a tier with namespaces can prevent the attack.
        own_kernel: whether a sandbox with its own kernel may allow the attack, which then reaches nothing of the host.
        at_start: whether the attack is tried each time that a sandbox is opened.
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
