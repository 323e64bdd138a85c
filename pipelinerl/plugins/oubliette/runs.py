"""Runs (executions of a program), their limits and their results. Sizes are in bytes, times in seconds."""

from __future__ import annotations

import resource
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pipelinerl.errors import PipelineError, UserError


class SandboxMissing(UserError):
    """No sandbox of the requested tier is available on this machine."""


class SandboxLost(PipelineError):
    """A guest (sandboxed process tree) ended, or did not answer in time, through no fault of the program in it."""


#: A program's environment variables.
ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


class Tier(StrEnum):
    """Strength of the isolation of a run; see docs/use/verification.md."""

    DEFAULT = "default"
    """bubblewrap around each guest; a run has its own namespaces, user id, file systems and system call filter."""
    STRONG = "strong"
    """gVisor, which gives each run its own user-space kernel. Used only if requested by name."""
    WEAK = "weak"
    """Landlock, system call filter and limits around one host process. Used only if requested by name."""

    @property
    def strength(self) -> int:
        """Rank of the tier; greater is stronger."""
        return [Tier.WEAK, Tier.DEFAULT, Tier.STRONG].index(self)


class Ending(StrEnum):
    """Reason why a run ended."""

    EXITED = "exited"
    SIGNALLED = "signalled"
    CPU_TIME = "cpu time"
    """Exceeded its limit of processor time."""
    DEADLINE = "deadline"
    """Exceeded its limit of elapsed time."""
    MEMORY = "memory"
    OUTPUT = "output"
    """Exceeded its output limit."""
    STARVED = "starved"
    """Exceeded its limit of elapsed time, but mostly waited for a processor; this says nothing about the program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run, for all of its processes together unless stated otherwise.

    Attributes:
        cpu_s: processor time. wall_s: elapsed time.
        address_space: whether each process's address space is limited; False for languages that reserve much of it.
        disk_bytes: size of the run's folder, which is in the machine's memory.
    """

    cpu_s: float = 10.0
    wall_s: float = 20.0
    memory_bytes: int = 512 << 20
    address_space: bool = True
    output_bytes: int = 16 << 20
    error_bytes: int = 64 << 10
    disk_bytes: int = 64 << 20
    inodes: int = 4096
    processes: int = 32
    open_files: int = 128

    def rlimits(self) -> dict[str, tuple[int, int]]:
        """Return the limits that `setrlimit` sets for each process of the run, soft and hard.

        They are lowered where they exceed this process's own hard limit, which its children cannot raise.
        """
        whole_s = max(1, int(self.cpu_s + 1))
        room = self.memory_bytes + _INTERPRETER_BYTES
        stack = min(self.memory_bytes, _MOST_STACK)
        limits = {
            "RLIMIT_CPU": (whole_s, whole_s + 1),
            "RLIMIT_DATA": (room if self.address_space else 4 * room,) * 2,
            "RLIMIT_FSIZE": (self.disk_bytes,) * 2,
            "RLIMIT_NPROC": (self.processes,) * 2,
            "RLIMIT_NOFILE": (self.open_files,) * 2,
            "RLIMIT_STACK": (stack, stack),
            "RLIMIT_CORE": (0, 0),
            "RLIMIT_MEMLOCK": (0, 0),
            "RLIMIT_MSGQUEUE": (0, 0),
            "RLIMIT_SIGPENDING": (256, 256),
        }
        if self.address_space:
            limits["RLIMIT_AS"] = (room + stack,) * 2
        for name, (soft, hard) in limits.items():
            most = resource.getrlimit(getattr(resource, name))[1]
            if most != resource.RLIM_INFINITY:
                limits[name] = min(soft, most), min(hard, most)
        return limits


#: Memory that a program's interpreter and libraries use before the program begins.
_INTERPRETER_BYTES: Final = 128 << 20
_MOST_STACK: Final = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One execution of a program.

    Attributes:
        argv: the command, with paths inside the guest.
        python: path of a Python program to run in a warm interpreter, instead of `argv`.
        files: names and contents of the files in the run's folder, /tmp, at the start.
    """

    argv: tuple[str, ...] = ()
    python: str = ""
    arguments: tuple[str, ...] = ()
    files: tuple[tuple[str, bytes], ...] = ()
    stdin: bytes = b""
    limits: Limits = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """Result of a run. `code` is the exit status, or minus the signal's number."""

    ending: Ending
    code: int
    stdout: bytes
    stderr: bytes
    cpu_s: float
    wall_s: float
    tier: Tier

    @property
    def succeeded(self) -> bool:
        return self.ending is Ending.EXITED and self.code == 0

    def describe(self) -> str:
        if self.ending is Ending.EXITED:
            lines = self.stderr.decode("utf-8", "replace").strip().splitlines()
            last = lines[-1][:200] if lines else "nothing on standard error"
            return "done" if self.code == 0 else f"exit status {self.code}: {last}"
        if self.ending is Ending.SIGNALLED:
            return f"ended by signal {-self.code}"
        return _ENDINGS[self.ending].format(cpu=self.cpu_s, wall=self.wall_s)


_ENDINGS: Final = {
    Ending.CPU_TIME: "exceeded its processor time: {cpu:.2f} s",
    Ending.DEADLINE: "did not finish within {wall:.1f} s of elapsed time",
    Ending.MEMORY: "exceeded its memory limit",
    Ending.OUTPUT: "exceeded its output limit",
    Ending.STARVED: "waited for a processor for most of {wall:.1f} s; this says nothing about the program",
}
