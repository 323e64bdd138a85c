"""Servers behind real HTTP on loopback, on a thread of this process or in a process that can be killed."""

import asyncio
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager

import httpx
import uvicorn

from pipelinerl.system.http_service import config_of, listen
from tests.patience import PATIENCE_S


@contextmanager
def in_thread(app, *, starts_in_s=PATIENCE_S):
    """Serve `app` on a thread and yield its base URL; stop the server at the end of the block."""
    listener = listen("127.0.0.1", 0)
    config, over = config_of(app), Future[None]()
    config.lifespan, config.timeout_graceful_shutdown = "auto", 1
    server = uvicorn.Server(config)
    # uvicorn's own loop would notice only at its next tick, of 0.1 s, that the server should end.
    server.main_loop = lambda: asyncio.wrap_future(over)  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])), daemon=True)
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


@contextmanager
def as_process(module, *arguments):
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
