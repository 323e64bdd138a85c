"""Runs inside a slot's box: `python3 -I -S server.py`. Forks each run into a box of its own.

This folder is all of the project that a box shows; it needs the standard library alone. Over its standard input, a
seqpacket socket, comes a request a packet, with open files beside it: standard input, output and error of the run, then
the files to be laid into its folder. For each it makes one process, which is the first of new namespaces, takes every
limit and the system call filter upon itself (`walls.py`), and only then becomes the program (`program.py`). When that
process is gone the kernel has ended whatever it had started, so one wait is the end of the run; ending it early is one
SIGKILL. The answer is one packet: `_ANSWER`, why the run was ended, a zero byte, what hindered it.

What a run costs is in most part memory: the kernel copies the table of this process' pages, then each page that a run
writes to, and each that this process writes to after a fork. So there are few pages, both do little and the same each
time, and whatever a run would be the first to do has been done here before.

This process never holds what a run reads or writes: a run is a fork of it, and could read that of those before. When
the socket closes, because whoever asked is gone, the run is killed and this process ends.

    waits for          at most            who unblocks it
    a request          for ever           the socket: a packet, or its end
    the end of a run   its deadline       the program, the tick that looks at its memory, "kill", the socket's end
"""

from __future__ import annotations

import _socket  # `socket` is much besides, which each fork would have a share in
import contextlib
import gc
import json
import os
import select
import signal
import struct
import sys
import time
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pipelinerl.verifiers.oubliette.box import program, walls
else:
    sys.path.insert(0, os.path.dirname(__file__))
    sys.dont_write_bytecode = True
    import program
    import walls

    del sys.path[0], sys.modules["program"], sys.modules["walls"]  # which are names that programs may give to theirs
    sys.dont_write_bytecode = False

#: How often the memory of a run is added up; and where its control group bounds it, too, the processor time alone.
_TICK_MS = 20.0
_SELDOM_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOST_PACKET = 1 << 16
_MOST_FILES = 16
#: Ends the run that is under way.
_KILL = b"{}"
#: Exit status, or minus the signal; seconds of processor time, on the clock, and without a processor.
_ANSWER = struct.Struct("=iddd")


def main() -> None:
    """Answer requests until the socket ends."""
    control = _socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    packet, files = _receive(control)
    around = walls.BoxWalls(json.loads(packet))
    watch = _Watch(control, _Meter(files[0] if files else None), around)
    program.be_ready()
    walls.keep_code()
    around.confine_server()
    gc.collect()
    walls.give_back_memory()
    gc.freeze()
    gc.disable()  # each run enables it for itself; a page that is never written to here is never copied for a run
    control.send(b"ready")
    known, request = b"", None
    while True:
        packet, files = _receive(control)
        if not packet:
            return
        if packet == _KILL:
            continue  # which came when the run had ended by itself
        if packet != known or request is None:  # most are like the one before
            known, request = packet, program.RunRequest(json.loads(packet), around)
        answer = _run(control, around, watch, request, files)
        if answer is None:
            return
        control.send(answer)


def _receive(control: _socket.socket) -> tuple[bytes, list[int]]:
    files: list[int] = []
    packet, extra, _, _ = control.recvmsg(_MOST_PACKET, _socket.CMSG_LEN(_MOST_FILES * 4))
    for level, kind, data in extra:
        if level == _socket.SOL_SOCKET and kind == _socket.SCM_RIGHTS:
            files += struct.unpack(f"{len(data) // 4}i", data[: len(data) // 4 * 4])
    return packet, files


def _run(
    control: _socket.socket, around: walls.BoxWalls, watch: _Watch, request: program.RunRequest, files: list[int]
) -> bytes | None:
    """Start, watch, reap. None: whoever asked is gone."""
    go_read, go_write = os.pipe()
    began = time.monotonic()
    watch.meter.begin()
    pid, handle = around.fork()
    if pid == 0:
        os.close(go_write)
        control.close()
        program.become(request, files, go_read, around.trouble_file)
    os.close(go_read)
    for file in files:
        os.close(file)
    try:
        around.map_ids(pid)
        os.write(go_write, b"g")
        ended = watch.until_it_ends(handle, pid, request.limits, began)
    except OSError as error:
        ended = f"{error}"
    os.close(go_write)
    delayed_s = 0.0
    if ended:
        delayed_s = _delayed_s(around.processes(pid))
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGKILL)
    code, cpu_s = watch.meter.reap(pid)
    os.close(handle)
    if ended == "gone":
        return None
    trouble = around.trouble() if code else b""
    return _ANSWER.pack(code, cpu_s, time.monotonic() - began, delayed_s) + ended.encode() + b"\0" + trouble


class _Watch:
    """Waits for what may happen while a run is under way."""

    def __init__(self, control: _socket.socket, meter: _Meter, around: walls.BoxWalls) -> None:
        self.meter = meter
        self._around = around
        self._control = control
        self._file = control.fileno()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def until_it_ends(self, handle: int, pid: int, limits: dict[str, Any], began: float) -> str:
        """Why the run has to be ended, or nothing where it has ended by itself."""
        self._poll.register(handle, select.POLLIN)
        try:
            if self._poll.poll(_TICK_MS) == [(handle, select.POLLIN)]:
                return ""  # most are over by then
            return self._slowly(handle, pid, limits, began)
        finally:
            self._poll.unregister(handle)

    def _slowly(self, handle: int, pid: int, limits: dict[str, Any], began: float) -> str:
        until, look = began + limits["wall_s"], began + _SELDOM_S
        while True:
            left_s = until - time.monotonic()
            if left_s <= 0:  # the time that it was ready, and had no processor, is not its own
                until = began + min(limits["wall_s"] + _delayed_s(self._around.processes(pid)), limits["starved_s"])
                if until <= time.monotonic() + _TICK_MS / 1000:
                    return "deadline"
                continue
            ready = dict(self._poll.poll(min(1000 * left_s, _TICK_MS)))
            if handle in ready:
                return ""
            if self._file in ready:
                packet, files = _receive(self._control)
                for file in files:
                    os.close(file)
                return "output" if packet else "gone"
            memory_bytes, cpu_s = 0, 0.0
            if not self.meter.counts or time.monotonic() >= look:
                memory_bytes, cpu_s = _used(self._around.processes(pid))
                look = time.monotonic() + _SELDOM_S
            cpu_s = self.meter.cpu_s(cpu_s)
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

    def reap(self, pid: int) -> tuple[int, float]:
        """Wait for its end: exit status, or minus the signal; and processor seconds of all since it began."""
        if self.counts:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), self.cpu_s(0.0)
        _, status, used = os.wait4(pid, 0)
        return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime

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


if __name__ == "__main__":
    main()
