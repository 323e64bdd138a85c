"""One process of a run: runs in a process group of its own, logs to its file, and stops on request or by force.

`start` returns immediately. After `finish` no process of its group is alive. All waiting is in the supervisor.

`RestartBudget` decides whether and when a dead process is restarted. It counts recent deaths: each `FORGIVEN_EVERY_S`
of uptime forgives one death. So a crash loop ends the run within seconds, while four unlucky kills in an hour do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

import httpx

from launch.plan import ProcessSpec
from pipelinerl.observability.samples import visible
from pipelinerl.observability.status import FORGIVEN_EVERY_S, RestartStatus
from pipelinerl.observability.usage import Usage, cpu_seconds
from pipelinerl.roles.role import RESTARTED_VARIABLE
from pipelinerl.system import http_client
from pipelinerl.system.supervised_process import tied

_PROBE_TIMEOUT_S = 0.5
_TAIL_BYTES = 32768
_LAST_LINES = 12
_FIRST_BACKOFF_S: Final = 0.5
_LONGEST_BACKOFF_S: Final = 30.0
#: A process that was up for longer than this is not in a crash loop, so it restarts after the shortest delay.
_SETTLED_S: Final = 10.0


@dataclass(slots=True)
class RestartBudget:
    """Limit on a process's restarts: each death counts until uptime forgives it; at most `limit` deaths may count."""

    limit: int
    deaths: int = 0
    unforgiven: float = 0.0

    def is_spent_by(self, up_s: float) -> bool:
        """True if a death now, after `up_s` seconds of uptime, would exceed the limit."""
        return self._after(up_s) > self.limit

    def died(self, up_s: float) -> float:
        """Count a death after `up_s` seconds of uptime; return the seconds to wait before the restart."""
        before = round(max(0.0, self._after(up_s) - 1.0))
        self.deaths, self.unforgiven = self.deaths + 1, self._after(up_s)
        return _FIRST_BACKOFF_S if up_s > _SETTLED_S else min(_LONGEST_BACKOFF_S, _FIRST_BACKOFF_S * 2**before)

    def status(self, name: str) -> RestartStatus:
        """Return the deaths so far and the limit of the process `name`, for the status of the run."""
        return RestartStatus(name=name, deaths=self.deaths, unforgiven=self.unforgiven, limit=self.limit)

    def _after(self, up_s: float) -> float:
        return max(0.0, self.unforgiven - up_s / FORGIVEN_EVERY_S) + 1.0


class State(StrEnum):
    """The stage of a process between its start and its end, which the supervisor advances."""

    WAITING = "waiting"
    """Waits until the processes that must be healthy first are healthy."""
    STARTING = "starting"
    HEALTHY = "healthy"
    BACKING_OFF = "backing_off"
    """Died; is restarted at the time `due`."""
    STOPPING = "stopping"
    """Asked to stop while the run continues; is killed at the time `due`."""
    ENDED = "ended"


class Process:
    """A process of the plan, through all its restarts."""

    def __init__(self, spec: ProcessSpec, logs: Path) -> None:
        self.spec = spec
        self.log = logs / f"{spec.name}.log"
        self.state = State.WAITING
        self.started_at = 0.0
        self.due = 0.0
        self.budget = RestartBudget(spec.restarts)
        self._used = Usage()
        self._is_measured = False
        self._log_offset = 0
        self._child: subprocess.Popen[bytes] | None = None

    def start(self, now: float) -> int:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        command = tied(self.spec.argv, cores=self.spec.cpu or ())
        with open(self.log, "ab", opener=_private) as log:
            self._log_offset = log.tell()
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **(os.environ if self.spec.inherits else {}),
                    **self.spec.env,
                    **({RESTARTED_VARIABLE: "1"} if self.budget.deaths else {}),
                },
                cwd=self.spec.cwd,
                start_new_session=True,
            )
        self.state, self.started_at, self._is_measured = State.STARTING, now, False
        return self._child.pid

    def note(self, line: str) -> None:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "a", opener=_private) as log:
            log.write(f"{line}\n")

    @property
    def pid(self) -> int | None:
        """The process id, which is also the group's; None if the process does not run."""
        return None if self._child is None else self._child.pid

    @property
    def usage(self) -> Usage:
        """Processor and GPU seconds of the process, over all its restarts by this launcher."""
        if self._child is None or self._is_measured:
            return self._used
        held_s = self.spec.gpus * (time.monotonic() - self.started_at)
        return self._used + Usage(cpu_seconds(self._child.pid), held_s)

    def exit_status(self) -> int | None:
        """Return the exit status: None while the process runs, negative if a signal ended it."""
        if self._child is None:
            return None
        self._measure(os.WEXITED | os.WNOWAIT | os.WNOHANG)
        return self._child.poll()

    def _measure(self, options: int) -> None:
        """Note what the process has used once it has ended: the system forgets this when its exit status is read."""
        child = self._child
        if child is not None and child.returncode is None and os.waitid(os.P_PID, child.pid, options) is not None:
            self._used, self._is_measured = self.usage, True

    def answers(self) -> bool:
        """Return whether the process's health check succeeds now."""
        return self.spec.health is None or answers(self.spec.health)

    def ask_to_stop(self) -> None:
        """Send SIGTERM to the process itself, which stops its own children."""
        if self._child is not None and self.exit_status() is None:
            self._child.terminate()

    def finish(self) -> None:
        """Kill all remaining processes of the group, and collect the exit status."""
        if self._child is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child.pid, signal.SIGKILL)
        self._measure(os.WEXITED | os.WNOWAIT)
        self._child.wait()
        self._child = None

    def last_lines(self) -> str:
        """Return the last lines logged since the last start, indented; JSON lines are reduced to level and message."""
        try:
            with self.log.open("rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_offset, end - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        shown: list[str] = []
        for line in lines[-_LAST_LINES:]:
            with contextlib.suppress(ValueError):
                fields = json.loads(line)
                if isinstance(fields, dict) and "message" in fields:
                    line = f"{fields.get('level', 'info')}: {fields['message']}\n{fields.get('trace') or ''}"
            shown += line.splitlines()
        return "\n".join(f"    {visible(text)}" for text in shown[-_LAST_LINES:]) or "    (it wrote nothing)"


def _private(path: str, flags: int) -> int:
    # Only the owner may read a log: a user's reward function may print private data into it.
    return os.open(path, flags, 0o600)


def exit_words(status: int) -> str:
    """Describe how a process ended."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def answers(address: str) -> bool:
    """Return whether the service at a health address (see `ProcessSpec.health`) is ready."""
    parts = urlsplit(address)
    if parts.scheme == "redis":  # the server must accept the password and have loaded its data
        with contextlib.suppress(OSError):
            words = f"AUTH {Path(unquote(parts.path)).read_text()}\r\nPING\r\n".encode()
            where = parts.hostname or "", parts.port or 0
            with socket.create_connection(where, _PROBE_TIMEOUT_S) as link, link.makefile("rb") as answers:
                link.sendall(words)
                return answers.readline() == b"+OK\r\n" and answers.readline() == b"+PONG\r\n"
        return False
    with contextlib.suppress(httpx.HTTPError), http_client.session(timeout_s=_PROBE_TIMEOUT_S) as http:
        return http.get(address).status_code == httpx.codes.OK
    return False
