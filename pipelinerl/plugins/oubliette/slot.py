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
from pipelinerl.plugins.oubliette.control_groups import ControlGroup, Hierarchies, Weight
from pipelinerl.plugins.oubliette.runs import Ending, Limits, ProgramResult, Run, SandboxLost, Tier, of_rlimits

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
_ENVIRONMENT: Final = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "TMPDIR": "/tmp", "LANG": "C.UTF-8"}


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


class Slot:
    """Runs programs in a guest (a sandboxed process tree), one at a time.

    `start` or the first run starts the guest; after a guest was lost, the next run starts another one.
    """

    def __init__(self, isolation: Isolation) -> None:
        self._isolation = isolation
        self._guest: _Guest | None = None
        self._group: ControlGroup | None = None
        self._cpu_began_s = 0.0
        self.began: float | None = None
        """Time at which the current run started; None without a run, or while the guest starts."""

    def start(self) -> None:
        """Start the guest in advance; a failure is reported by the first run."""
        with contextlib.suppress(SandboxLost, OSError):
            self._make_group()
            self._guest = _Guest.start(self._isolation, self._group)

    def run(self, run: Run) -> ProgramResult:
        """Run a program. Raises `SandboxLost` if the guest cannot be started, ends, or does not answer."""
        self._make_group()
        kills = self._begin(run.limits)
        began = time.monotonic()
        try:
            if self._guest is None:
                self._guest = _Guest.start(self._isolation, self._group)
            self._cpu_began_s = 0.0 if self._group is None else self._group.cpu_s()
            self.began = time.monotonic()
            result = self._guest.run(run, self._isolation)
        except SandboxLost:
            self._lose()
            if not self._killed_since(kills):
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
        return replace(result, ending=Ending.MEMORY) if self._killed_since(kills) else result

    def _make_group(self) -> None:
        if self._group is None and isinstance(where := control_groups.available(), Hierarchies):
            self._group = ControlGroup(where)

    def _begin(self, limits: Limits) -> int:
        """Set the guest's limits for a run; return how many processes the kernel has killed for lack of memory so far.

        Without a control group, nothing is set or counted, and the result is 0.
        """
        if self._group is None:
            return 0
        self._group.weigh(Weight.FULL)
        self._group.limit(limits.memory_bytes + limits.disk_bytes + _SERVER_BYTES)
        return self._group.oom_kills()

    def _killed_since(self, kills: int) -> bool:
        return self._group is not None and self._group.oom_kills() > kills

    def cpu_s(self) -> float:
        """Return the processor seconds of the slot's guests so far, if a control group counts them; else 0."""
        return 0.0 if self._group is None else self._group.cpu_s()

    def goes_behind(self) -> bool:
        """Lower the processor share of the current run if it has used much processor time. Thread-safe.

        Returns True if no more checks are needed: the share is lowered, or there is no control group.
        """
        if self._group is None:
            return True
        if self.began is None or self._group.cpu_s() - self._cpu_began_s < _GREEDY_CPU_S:
            return False
        self._group.weigh(Weight.BEHIND_OTHERS)
        return True

    def interrupt(self) -> None:
        """Kill the guest, so that its run is lost; called by other threads."""
        if self._guest is not None:
            self._guest.interrupt()

    def close(self) -> None:
        self._lose()
        if self._group is not None:
            self._group.close()
            self._group = None

    def _lose(self) -> None:
        if self._guest is not None:
            self._guest.kill()
            self._guest = None


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
            reader = _Reader(self._control, out_read, err_read, run.limits)
            answer = reader.read(time.monotonic() + _STARVED_TIMES * run.limits.wall_s + _GRACE_S)
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
            stdout=bytes(reader.stdout),
            stderr=bytes(reader.stderr),
            cpu_s=answer.cpu_s,
            wall_s=answer.wall_s,
            tier=isolation.tier,
        )

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


class _Answer(NamedTuple):
    """The server's answer to a request: status and times of the run, why it was killed, and any startup error."""

    code: int
    cpu_s: float
    wall_s: float
    delayed_s: float
    ended: str
    trouble: str


class _Reader:
    def __init__(self, control: socket.socket, out: int, err: int, limits: Limits) -> None:
        self._control = control
        self._most = {out: limits.output_bytes, err: limits.error_bytes}
        self._read: dict[int, bytearray] = {out: bytearray(), err: bytearray()}
        self._out = out
        self.stdout, self.stderr = self._read[out], self._read[err]

    def read(self, until: float) -> _Answer | None:
        poll = select.poll()
        waiting = {self._control.fileno(), *self._read}
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
                if file in self._read:
                    if self._take(file):
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
            if len(self.stdout) > self._most[self._out] and not ended_by_us:
                ended_by_us = True
                with contextlib.suppress(OSError):
                    self._control.send(b"{}")
        return answer._replace(ended="output") if answer is not None and ended_by_us else answer

    def _take(self, file: int) -> bool:
        """Read a chunk of a run's output; return False at its end. Output beyond the limit is read but not kept."""
        part = os.read(file, _CHUNK)
        kept = self._read[file]
        kept += part[: max(0, self._most[file] + 1 - len(kept))]
        return bool(part)


@lru_cache(maxsize=64)  # cached, since most requests repeat and building one takes many system calls
def _request(
    argv: tuple[str, ...], python: str, arguments: tuple[str, ...], files: tuple[str, ...], limits: Limits
) -> bytes:
    rlimits = of_rlimits(limits.rlimits())
    request = {
        "argv": [*argv, *arguments],
        "python": python,
        "arguments": arguments,
        "files": files,
        "environment": _ENVIRONMENT,
        "limits": {
            "wall_s": limits.wall_s,
            "starved_s": _STARVED_TIMES * limits.wall_s,
            "cpu_s": limits.cpu_s,
            "memory_bytes": limits.memory_bytes,
            "disk_bytes": limits.disk_bytes,
            "inodes": limits.inodes,
            "rlimits": [[getattr(resource, name), *pair] for name, pair in rlimits.items()],
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
