"""Measure, from a separate process, how long a busy server makes its clients wait.

A busy and an idle server get `/health` requests at the same moments; another process sends the busy server's load. A
*stall* is how much later the busy server answers than the idle one, minus the time for which the busy server was ready
to run but got no core: a machine that is merely busy causes no stall.

    python -m tests.security.waiting URL IDLE_URL PID      prints its longest stalls as JSON once stdin has closed
"""

from __future__ import annotations

import heapq
import json
import select
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, final

from tests.patience import PATIENCE_S
from tests.security.raw_http import connect

_PROBE_EVERY_S: Final = 0.005
_KEPT: Final = 3


@dataclass(frozen=True, slots=True, order=True)
class Stall:
    """A delay that the server itself caused; `began` and `ended` are readings of the monotonic clock."""

    seconds: float
    waited_s: float = 0.0
    began: float = 0.0
    ended: float = 0.0


@final
class Waiting:
    """Watches a server for stalls, from the start of the `with` block until `stalls` is called."""

    def __init__(self, url, idle_url, *, pid):
        command = [sys.executable, "-m", "tests.security.waiting", url, idle_url, str(pid)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self):
        assert self._process.stdout is not None and self._process.stdout.readline() == "watching\n"
        return self

    def stalls(self):
        """Stop watching; return the longest stalls, longest first."""
        output, _ = self._process.communicate(timeout=PATIENCE_S)
        return [Stall(**stall) for stall in json.loads(output)]

    def __exit__(self, *_):
        self._process.kill()
        self._process.communicate()


def _watch(target, idle, pid):
    longest = [Stall(0.0)]
    while not select.select([sys.stdin], [], [], _PROBE_EVERY_S)[0]:
        not_run, began = _not_run_s(pid), time.monotonic()
        waited = _asked(target, idle)
        ended, excuse = time.monotonic(), max(waited[idle], _not_run_s(pid) - not_run)
        heapq.heappush(longest, Stall(waited[target] - excuse, waited[target], began, ended))
        if len(longest) > _KEPT:
            heapq.heappop(longest)
    return sorted(longest, reverse=True)


def _asked(*connections):
    """Send one request on each connection at the same time; return the seconds until each was answered."""
    received, took, began = dict.fromkeys(connections, b""), dict[socket.socket, float](), time.monotonic()
    for connection in connections:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while len(took) < len(connections):
        ready, _, _ = select.select([one for one in connections if one not in took], [], [], PATIENCE_S)
        assert ready, f"no answer within {PATIENCE_S:g} s"
        for connection in ready:
            piece = connection.recv(65536)
            assert piece, "the connection was closed"
            received[connection] += piece
            if b"\r\n\r\n" in received[connection] and received[connection].endswith(b"}"):
                took[connection] = time.monotonic() - began
    return took


def _not_run_s(pid):
    """Return the seconds for which the process's main thread, which runs the event loop, waited for a CPU core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def main(url, idle_url, pid):
    """Watch the busy server until stdin closes, then print its longest stalls."""
    with connect(url) as target, connect(idle_url) as idle:
        _asked(target, idle)
        print("watching", flush=True)
        print(json.dumps([asdict(stall) for stall in _watch(target, idle, pid)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
