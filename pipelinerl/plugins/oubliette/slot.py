"""`Slot`: starts a guest (a sandboxed process tree) and runs programs in it, one at a time, blocking meanwhile.

    waits for                      at most                            then
    the server's first packet      `_STARTUP_S`                       the guest is killed: `SandboxLost`
    a run's output and result      `_STARVED_TIMES` · its deadline    the guest is killed: `SandboxLost`
                                   + `_GRACE_S`

A run's output comes through pipes, of which the slot keeps only as many bytes as the limit. Its input is in sealed
memory files, which it cannot change. If the server dies, its runs die, too. Bubblewrap dies with the thread that
started it, so use a slot from one thread that lives as long as the slot.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import subprocess
import tempfile
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple

from pipelinerl.plugins.oubliette import control_groups
from pipelinerl.plugins.oubliette.control_groups import FULL_WEIGHT, LOW_WEIGHT, ControlGroup, Hierarchies
from pipelinerl.plugins.oubliette.runs import ENVIRONMENT, Ending, Limits, ProgramResult, Run, SandboxLost, Tier

_STARTUP_S: Final = 60.0
_GRACE_S: Final = 30.0
#: Processor seconds after which a run gets a lower processor share.
_GREEDY_CPU_S: Final = 0.1
#: Memory of a guest's server and of the kernel's tables, in addition to the run's.
_SERVER_BYTES: Final = 64 << 20
_MOST_PACKET: Final = 1 << 16
_CHUNK: Final = 1 << 18
_F_ADD_SEALS: Final = 1033
_ALL_SEALS: Final = 0x1 | 0x2 | 0x4 | 0x8
#: A run's deadline is extended by the time that it waits for a processor, to at most this multiple of the deadline.
_STARVED_TIMES: Final = 5.0
#: Format of the server's answer; must equal `_ANSWER` in `guest/server.py`.
_ANSWER: Final = struct.Struct("=iddd")


@dataclass(frozen=True, slots=True, kw_only=True)
class Isolation:
    """Isolation of the runs of one slot.

    Attributes:
        command: the command that starts the guest with its server.
        namespaces: whether each run gets its own namespaces; else a run is a single process of the host.
        outer_id: the run's user id outside its namespace.
        filter: the seccomp program of each run. servers_filter: the server's seccomp program, which each run inherits.
        shown: paths that a run without namespaces may read.
    """

    tier: Tier
    command: tuple[str, ...]
    namespaces: bool
    outer_id: int
    filter: bytes
    servers_filter: bytes = b""
    shown: tuple[str, ...] = ()


class SlotGroup:
    """The control group of a slot, if this machine can create one, and its accounts of the slot's current run.

    A run's processes get `own_bytes` of memory beyond its limits. After `greedy_cpu_s` processor seconds, the run gets
    a lower processor share.
    """

    def __init__(self, *, own_bytes: int, greedy_cpu_s: float) -> None:
        self.group: ControlGroup | None = None
        self._own_bytes, self._greedy_cpu_s = own_bytes, greedy_cpu_s
        self._kills, self._cpu_began_s = 0, 0.0

    def open(self) -> None:
        if self.group is None and isinstance(where := control_groups.available(), Hierarchies):
            self.group = ControlGroup(where)

    def admit(self, limits: Limits) -> None:
        """Set the limits of the next run, and the full processor share."""
        self.open()
        if self.group is not None:
            self.group.weigh(FULL_WEIGHT)
            self.group.limit(limits.memory_bytes + limits.disk_bytes + self._own_bytes)
            self._kills = self.group.oom_kills()

    def begin(self) -> None:
        """Count processor time from now on."""
        self._cpu_began_s = 0.0 if self.group is None else self.group.cpu_s()

    def cpu_s(self) -> float:
        """Return the processor seconds since `begin`; 0 without a control group."""
        return 0.0 if self.group is None else self.group.cpu_s() - self._cpu_began_s

    def ran_out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of the run for lack of memory."""
        return self.group is not None and self.group.oom_kills() > self._kills

    def goes_behind(self) -> bool:
        """Lower the processor share of a run that has used much processor time. Thread-safe.

        Returns True if no more checks are needed: the share is lowered, or there is no control group.
        """
        if self.group is not None:
            if self.cpu_s() < self._greedy_cpu_s:
                return False
            self.group.weigh(LOW_WEIGHT)
        return True

    def close(self) -> None:
        if self.group is not None:
            self.group.close()
            self.group = None


class Outputs:
    """The output of a run, from the pipes `out` and `err`: of each, at most its limit and one byte is kept."""

    def __init__(self, out: int, err: int, limits: Limits) -> None:
        self.stdout, self.stderr = bytearray(), bytearray()
        self.files = {out: (self.stdout, limits.output_bytes), err: (self.stderr, limits.error_bytes)}
        self._most = limits.output_bytes

    @property
    def are_too_long(self) -> bool:
        return len(self.stdout) > self._most

    def take(self, file: int) -> bool:
        """Read a chunk from one of the pipes; return False at its end."""
        part = os.read(file, _CHUNK)
        kept, most = self.files[file]
        kept += part[: max(0, most + 1 - len(kept))]
        return bool(part)


class Slot:
    """Runs programs in a guest (a sandboxed process tree), one at a time.

    `start` or the first run starts the guest; after a guest was lost, the next run starts another one.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._guest: _Guest | None = None
        self.group = SlotGroup(own_bytes=_SERVER_BYTES, greedy_cpu_s=_GREEDY_CPU_S)
        self.began: float | None = None
        """Time at which the current run started; None without a run, or while the guest starts."""

    def start(self) -> None:
        """Start the guest in advance; a failure is reported by the first run."""
        with contextlib.suppress(SandboxLost, OSError):
            self.group.open()
            self._guest = _Guest.start(self._isolation, self.group.group)

    def run(self, run: Run) -> ProgramResult:
        """Run a program. Raises `SandboxLost` if the guest cannot be started, ends, or does not answer."""
        self.group.admit(run.limits)
        began = time.monotonic()
        try:
            if self._guest is None:
                self._guest = _Guest.start(self._isolation, self.group.group)
            self.group.begin()
            self.began = time.monotonic()
            result = self._guest.run(run, self._isolation)
        except SandboxLost:
            self._lose()
            if not self.group.ran_out_of_memory():
                raise
            # The run filled the slot's memory, and the kernel killed the server.
            return ProgramResult(
                ending=Ending.MEMORY,
                code=-signal.SIGKILL,
                stdout=b"",
                stderr=b"",
                cpu_s=0.0,
                wall_s=time.monotonic() - began,
                tier=self._isolation.tier,
            )
        except BaseException:
            self._lose()
            raise
        finally:
            self.began = None
        return replace(result, ending=Ending.MEMORY) if self.group.ran_out_of_memory() else result

    def interrupt(self) -> None:
        """Kill the guest, so that its run is lost; called by other threads."""
        if self._guest is not None:
            self._guest.interrupt()

    def close(self) -> None:
        self._lose()
        self.group.close()

    def _lose(self) -> None:
        if self._guest is not None:
            self._guest.kill()
            self._guest = None


class _Answer(NamedTuple):
    """The server's answer to a request: status and times of the run, why it was killed, and any startup error."""

    code: int
    cpu_s: float
    wall_s: float
    delayed_s: float
    ended: str
    trouble: str


class _Guest:
    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket, words: Any) -> None:
        self._process = process
        self._control = control
        self._words = words
        self._last_words = ""

    @classmethod
    def start(cls, isolation: Isolation, group: ControlGroup | None) -> _Guest:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = tempfile.TemporaryFile()  # noqa: SIM115 - the guest keeps it open
        with theirs:
            # start bubblewrap without environment variables, since /proc/1/environ in the guest shows them
            command = isolation.command if group is None else group.entering(isolation.command)
            end = theirs.fileno()
            process = subprocess.Popen(command, stdin=end, stdout=words, stderr=words, env={}, cwd="/")
        guest = cls(process, ours, words)
        try:
            settings = {
                "namespaces": isolation.namespaces,
                "outer_id": isolation.outer_id,
                "filter": isolation.filter.hex(),
                "servers_filter": isolation.servers_filter.hex(),
                "shown": isolation.shown,
            }
            ours.settimeout(_STARTUP_S)
            files = [] if group is None else [group.open_cpu()]
            try:
                socket.send_fds(ours, [json.dumps(settings).encode()], files)
            finally:
                for file in files:
                    os.close(file)
            first = ours.recv(_MOST_PACKET)
        except OSError as error:
            guest.kill()
            raise SandboxLost(
                f"the guest did not start: {type(error).__name__}; its output: {guest.last_words()}"
            ) from None
        if not first:
            guest.kill()
            raise SandboxLost(f"the guest did not start; its output: {guest.last_words()}")
        return guest

    def run(self, run: Run, isolation: Isolation) -> ProgramResult:
        out_read, out_write = os.pipe()
        err_read, err_write = os.pipe()
        theirs = [out_write, err_write]
        try:
            if isolation.outer_id != os.geteuid():  # a run can open /dev/stdout only if its user owns the pipe
                os.fchown(out_write, isolation.outer_id, -1)
                os.fchown(err_write, isolation.outer_id, -1)
            theirs[0:0] = [_sealed(run.stdin)]
            theirs += [_sealed(data) for _, data in run.files]
            try:
                self._control.settimeout(_GRACE_S)
                names = tuple(name for name, _ in run.files)
                request = _request(run.argv, run.python, run.arguments, names, run.limits)
                socket.send_fds(self._control, [request], theirs)
            except OSError as error:
                raise SandboxLost(f"the guest is gone: {error}; its output: {self.last_words()}") from None
            while theirs:
                os.close(theirs.pop())
            outputs = Outputs(out_read, err_read, run.limits)
            answer = self._answer(outputs, until=time.monotonic() + _STARVED_TIMES * run.limits.wall_s + _GRACE_S)
        finally:
            for file in (*theirs, out_read, err_read):
                os.close(file)
        if answer is None:
            raise SandboxLost(f"the guest did not answer; its output: {self.last_words()}")
        if answer.trouble:
            raise SandboxLost(f"a run could not start in its guest: {answer.trouble}")
        return ProgramResult(
            ending=_ending(answer, run.limits),
            code=answer.code,
            stdout=bytes(outputs.stdout),
            stderr=bytes(outputs.stderr),
            cpu_s=answer.cpu_s,
            wall_s=answer.wall_s,
            tier=isolation.tier,
        )

    def _answer(self, outputs: Outputs, *, until: float) -> _Answer | None:
        """Read the outputs and the answer of a run to their ends; return None without a whole answer."""
        poll = select.poll()
        waiting = {self._control.fileno(), *outputs.files}
        for file in waiting:
            poll.register(file, select.POLLIN)
        answer: _Answer | None = None
        ended_by_us = False
        while waiting:
            left_s = until - time.monotonic()
            ready = poll.poll(1000 * left_s) if left_s > 0 else []
            if not ready:
                return None
            for file, _ in ready:
                if file in outputs.files:
                    if outputs.take(file):
                        continue
                else:
                    packet = b""
                    with contextlib.suppress(ConnectionResetError):  # the guest was killed before it read its request
                        packet = self._control.recv(_MOST_PACKET)
                    if len(packet) < _ANSWER.size:
                        return None
                    ended, _, trouble = packet[_ANSWER.size :].decode("utf-8", "replace").partition("\0")
                    code, cpu_s, wall_s, delayed_s = _ANSWER.unpack_from(packet)
                    answer = _Answer(code, cpu_s, wall_s, delayed_s, ended, trouble)
                poll.unregister(file)
                waiting.discard(file)
            if outputs.are_too_long and not ended_by_us:
                ended_by_us = True
                with contextlib.suppress(OSError):
                    self._control.send(b"{}")
        return answer._replace(ended="output") if answer is not None and ended_by_us else answer

    def kill(self) -> None:
        self._control.close()
        self.interrupt()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        self._last_words = self.last_words()
        self._words.close()

    def interrupt(self) -> None:
        with contextlib.suppress(OSError):
            self._process.send_signal(signal.SIGKILL)

    def last_words(self) -> str:
        if self._words.closed:
            return self._last_words
        self._words.seek(0)
        return self._words.read(4096).decode("utf-8", "replace").strip() or "nothing"


@lru_cache(maxsize=64)  # cached, since most requests repeat and building one takes many system calls
def _request(
    argv: tuple[str, ...], python: str, arguments: tuple[str, ...], files: tuple[str, ...], limits: Limits
) -> bytes:
    request = {
        "argv": [*argv, *arguments],
        "python": python,
        "arguments": arguments,
        "files": files,
        "environment": ENVIRONMENT,
        "limits": {
            "wall_s": limits.wall_s,
            "starved_s": _STARVED_TIMES * limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "rlimits": [[getattr(resource, name), *pair] for name, pair in limits.rlimits().items()],
        },
    }
    return json.dumps(request).encode()


def _ending(answer: _Answer, limits: Limits) -> Ending:
    ended = answer.ended
    if ended == "output":
        return Ending.OUTPUT
    if ended == "memory":
        return Ending.MEMORY
    if ended == "cpu time" or answer.cpu_s > limits.cpu_s:
        return Ending.CPU_TIME
    if ended == "deadline":
        had_s = answer.wall_s - answer.delayed_s
        return Ending.STARVED if had_s < limits.wall_s / 2 else Ending.DEADLINE
    if ended:
        raise SandboxLost(f"a run could not start in its guest: {ended}")
    return Ending.SIGNALLED if answer.code < 0 else Ending.EXITED


def _sealed(data: bytes) -> int:
    file = os.memfd_create("oubliette", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file, view) :]
        os.lseek(file, 0, os.SEEK_SET)
        fcntl.fcntl(file, _F_ADD_SEALS, _ALL_SEALS)
    except BaseException:
        os.close(file)
        raise
    return file
