"""`Child`: a child process that this process starts, speaks with over a socket, and kills with all its descendants.

The socket is the child's standard input. Each message is one line of JSON (`Lines`). The child's first message says
that it is ready, or `{"error": reason}`. Its output goes to this process's output. A wrapper (`supervised_process.py`)
ties it to this process, so that neither it nor any of its descendants outlives this process or `kill`.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the first message | the child | `startup_s`, then `ChildLost` |
| the end of a killed child | its wrapper | `_END_S` |
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

from pipelinerl.system.background import to_its_end
from pipelinerl.system.supervised_process import ending_of, supervised

_END_S: Final = 60.0


class ChildLost(Exception):
    """A child could not be started, or has ended; the message says how."""


class Lines:
    """JSON messages over a socket, one per line of at most `most_bytes`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, connection: socket.socket, *, most_bytes: int) -> Self:
        """Take over a connected socket; it is closed if this fails."""
        try:
            return cls(*await asyncio.open_connection(sock=connection, limit=most_bytes))
        except BaseException:
            connection.close()
            raise

    @property
    def is_open(self) -> bool:
        """False once this end is closed, or the other end is closed and everything is read."""
        return not self._reader.at_eof() and not self._writer.is_closing()

    def write(self, line: bytes) -> None:
        """Send an encoded message in the background; no-op if this end is closed."""
        if not self._writer.is_closing():  # writing to a closing stream would raise RuntimeError under uvloop
            self._writer.write(line)

    async def send(self, message: Any) -> None:
        """Send a message; if this call is cancelled, the rest is sent in the background. Raises `OSError`."""
        self.write(encoded(message))
        await self._writer.drain()

    async def receive(self) -> Any:
        """Return the next message. Raises `EOFError` if the other end is closed, `ValueError` if it is no message."""
        try:
            line = await self._reader.readline()
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise EOFError
        try:
            return json.loads(line)
        except RecursionError:
            raise ValueError("a line is nested too deeply") from None

    def close(self) -> None:
        self._writer.close()


def encoded(message: Any) -> bytes:
    """Return a message as a line of JSON."""
    return json.dumps(message).encode() + b"\n"


class Child:
    """A running child; `first` is its first message, and `socket` the connection, for passing files by `send_fds`."""

    def __init__(self, process: Process, connection: socket.socket, lines: Lines) -> None:
        self._process = process
        self.socket: Final = connection
        self.lines: Final = lines
        self.first: dict[str, Any] = {}

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        name: str,
        *,
        startup_s: float,
        most_bytes: int = 2**16,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Self:
        """Start a program; return it once it is ready. Raises `ChildLost`, with the child's own reason or its `name`.

        `env` replaces the environment. The child gets `options` as its first message, since `ps` shows commands to all.
        The calling thread must live as long as the child.
        """
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as given_up:
            given_up.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *supervised(command), stdin=theirs.fileno(), env=env, start_new_session=True
            )
            given_up.pop_all()
        try:
            child = cls(process, ours, await Lines.open(ours, most_bytes=most_bytes))
        except BaseException:
            await to_its_end(end(process))
            raise
        try:
            async with asyncio.timeout(startup_s):
                if options is not None:
                    await child.lines.send(options)
                child.first = await child.lines.receive()
        except (TimeoutError, EOFError, ValueError, OSError):
            child.first = {"error": f"{name} did not start; its output says why"}
        except BaseException:
            await child.close()  # after a cancellation, reap the killed process while the event loop still runs
            raise
        if "error" in child.first:
            await child.close()
            raise ChildLost(child.first["error"])
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.returncode is not None

    async def ending(self, *, timeout_s: float) -> str:
        """Wait until the child ends; return how, as in "was killed by SIGKILL". Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s):
            return ending_of(await self._process.wait())

    def kill(self) -> None:
        """Kill the child and all its descendants, and close the connection, without waiting."""
        _kill(self._process)
        self.lines.close()

    async def close(self) -> None:
        """Kill the child and reap it, even if this call is cancelled."""
        self.lines.close()
        await to_its_end(end(self._process))


async def end(process: Process, *, grace_s: float = 0.0) -> None:
    """End a supervised process by SIGTERM and wait for its end, at most `grace_s` (of its wrapper) and `_END_S`."""
    _kill(process)
    async with asyncio.timeout(grace_s + _END_S):
        await process.wait()


def _kill(process: Process) -> None:
    # `Process.kill` would reap a process that has just ended, which asyncio then reports as unknown.
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGTERM)  # its wrapper then kills all descendants
