"""Server inside a slot's guest (`python3 -I -S server.py`); it forks a process with its own namespaces for each run.

Only the standard library is imported. Requests arrive one per packet on standard input, a seqpacket socket, along with
open files: the run's standard input, output and error, then the files to copy into its folder.

The forked process is the first in its namespaces. It applies all limits and the system call filter to itself
(`isolation.py`), and then becomes the program (`program.py`). When it exits, the kernel kills everything that it
started. The answer is one packet: exit status and times (`_ANSWER`), then the reason why the server killed the run
(empty if it ended by itself), a zero byte, and any startup error.

Most of a run's cost is copying memory: this process's page table, and each page that the run or this process writes to
after the fork. The server therefore has few pages, both processes do little, and first-time work of runs is done here
in advance.

This process never holds a run's input or output, which later forks could read. When the client closes the socket, the
run is killed and this process ends.

    waits for          at most            unblocked by
    a request          forever            the socket: a packet, or its end
    the end of a run   its deadline       the program, the tick that checks its memory, "kill", the socket's end
"""

from __future__ import annotations

import _socket  # not `socket`, which is much larger: each fork copies the page table
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
    from pipelinerl.plugins.oubliette.guest import isolation, program
else:
    sys.path.insert(0, os.path.dirname(__file__))
    sys.dont_write_bytecode = True
    import isolation
    import program

    # Forget these two modules, since programs may import modules of their own with the same names.
    del sys.path[0], sys.modules["program"], sys.modules["isolation"]
    sys.dont_write_bytecode = False

#: Intervals at which a run's memory is summed: `_TICK_MS` without a control group; `_SELDOM_S` if a group limits it.
_TICK_MS = 20.0
_SELDOM_S = 0.1
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MOST_PACKET = 1 << 16
_MOST_FILES = 16
#: Packet that ends the current run.
_KILL = b"{}"
#: Format of a run's result: exit status or minus the signal, then seconds of processor time, of elapsed time, and of
#: waiting for a processor.
_ANSWER = struct.Struct("=iddd")


def main() -> None:
    """Answer requests until the socket closes."""
    control = _socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    packet, files = _receive(control)
    around = isolation.GuestIsolation(json.loads(packet))
    watch = _Watch(control, _Meter(files[0] if files else None), around)
    program.be_ready()
    isolation.keep_code()
    around.confine_server()
    gc.collect()
    isolation.give_back_memory()
    gc.freeze()
    # Garbage collection here would write to pages, which would then be copied for a run. Runs enable it again.
    gc.disable()
    control.send(b"ready")
    known, request = b"", None
    while True:
        packet, files = _receive(control)
        if not packet:
            return
        if packet == _KILL:
            continue  # the run to kill has already ended by itself
        if packet != known or request is None:
            # Most requests equal the previous one, which need not be parsed again.
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
    control: _socket.socket,
    around: isolation.GuestIsolation,
    watch: _Watch,
    request: program.RunRequest,
    files: list[int],
) -> bytes | None:
    """Start a run, wait for its end and return the answer; None if the client is gone."""
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
    def __init__(self, control: _socket.socket, meter: _Meter, around: isolation.GuestIsolation) -> None:
        self.meter = meter
        self._around = around
        self._control = control
        self._file = control.fileno()
        self._poll = select.poll()
        self._poll.register(self._file, select.POLLIN)

    def until_it_ends(self, handle: int, pid: int, limits: dict[str, Any], began: float) -> str:
        """Wait for the run's end; return the reason why the run must be killed, or "" if it ended by itself."""
        self._poll.register(handle, select.POLLIN)
        try:
            if self._poll.poll(_TICK_MS) == [(handle, select.POLLIN)]:
                return ""  # usually, a run ends within the first interval
            until, look = began + limits["wall_s"], began + _SELDOM_S
            while True:
                left_s = until - time.monotonic()
                if left_s <= 0:  # waiting for a processor does not count towards the deadline
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
        finally:
            self._poll.unregister(handle)


class _Meter:
    """Measures a run's processor time by the guest's control group (open `file`) or, without one, by `wait4`."""

    def __init__(self, file: int | None) -> None:
        self._file = file
        self._began_s = 0.0

    @property
    def counts(self) -> bool:
        return self._file is not None

    def begin(self) -> None:
        self._began_s = self._taken_s()

    def cpu_s(self, otherwise: float) -> float:
        """Return the processor seconds since `begin`, or `otherwise` without a control group."""
        return otherwise if self._file is None else max(0.0, self._taken_s() - self._began_s)

    def reap(self, pid: int) -> tuple[int, float]:
        """Wait for the process; return its exit status, or minus the signal, and the run's processor seconds."""
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
    """Return (bytes of memory that no file backs, processor seconds), summed over the processes of a run."""
    memory_bytes = ticks = 0
    for name in processes:
        with contextlib.suppress(OSError):  # the process may have ended
            with open(f"/proc/{name}/stat", "rb") as file:
                ticks += sum(int(field) for field in file.read().rpartition(b")")[2].split()[11:15])
            with open(f"/proc/{name}/status", "rb") as file:
                for line in file:
                    if line.startswith((b"RssAnon:", b"RssShmem:", b"VmSwap:")):
                        memory_bytes += int(line.split()[1]) << 10
    return memory_bytes, ticks / _TICKS_PER_S


def _delayed_s(processes: list[str]) -> float:
    """Return the longest time, in seconds, for which a single thread of a run waited for a processor."""
    longest = 0
    for name in processes:
        with contextlib.suppress(OSError, ValueError, IndexError):
            for thread in os.listdir(f"/proc/{name}/task"):
                with open(f"/proc/{name}/task/{thread}/schedstat") as file:
                    longest = max(longest, int(file.read().split()[1]))
    return longest / 1e9


if __name__ == "__main__":
    main()
