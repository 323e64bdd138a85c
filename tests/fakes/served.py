"""Servers behind real HTTP on loopback, on a thread of this process or in a process that can be killed."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final

import httpx
import uvicorn

from pipelinerl.system.http_service import config_of, listen
from tests.patience import PATIENCE_S

#: Seconds that a stopped server waits for the requests that it is answering.
_GRACE_S: Final = 1.0


@contextmanager
def in_thread(app: Any, *, starts_in_s: float = PATIENCE_S) -> Iterator[str]:
    """Serve `app` on a thread and yield its base URL; stop the server at the end of the block."""
    listener = listen("127.0.0.1", 0)
    config, over = config_of(app), Future[None]()
    config.lifespan = "auto"
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(_serve(server, listener, over)), daemon=True)
    thread.start()
    deadline = time.monotonic() + starts_in_s
    while not server.started:
        assert thread.is_alive() and time.monotonic() < deadline, "the server has not started"
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set_result(None)
        thread.join(PATIENCE_S)
        listener.close()


async def _serve(server: uvicorn.Server, listener: socket.socket, over: Future[None]) -> None:
    """Serve until `over` is done, like `uvicorn.Server.serve`, whose end would take 0.3 s."""
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listener])
    await asyncio.wrap_future(over)
    state, deadline = server.server_state, time.monotonic() + _GRACE_S
    for accepting in server.servers:
        accepting.close()
    for connection in list(state.connections):
        connection.shutdown()
    while (state.connections or state.tasks) and time.monotonic() < deadline:
        await asyncio.sleep(0.002)
    for task in state.tasks:
        task.cancel()
    await server.lifespan.shutdown()


@contextmanager
def as_process(module: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Run `python -m module`, which prints its port; yield its base URL and process; kill it when the block ends."""
    process = subprocess.Popen([sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{int(process.stdout.readline())}"
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                httpx.get(url + "/health", trust_env=False, timeout=1.0).raise_for_status()
                break
            except httpx.HTTPError:
                assert process.poll() is None and time.monotonic() < deadline, "the engine has not started"
                time.sleep(0.02)
        yield url, process
    finally:
        process.kill()
        process.wait(PATIENCE_S)
        if process.stdout is not None:
            process.stdout.close()
