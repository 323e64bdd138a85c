"""One server as its own process: the target of a fuzzing campaign. It measures how long its clients have to wait.

python -m tests.security.fuzzed_server SERVER DIRECTORY      prints its port, serves until it is killed

A *stall* is a time for which the event loop ran no other task, minus the time for which this process was ready to run
but got no core: a machine that is merely busy causes no stall. The longest is kept in the directory's file `stall`.
"""

import asyncio
import json
import os
import sys
import time
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import uvloop

from pipelinerl.system.http_service import listen, serve_until
from tests.security.servers import TOKEN, application

_TICK_S = 0.005


@asynccontextmanager
async def at_work(server, directory):
    """Yield the server's application; if it is a controller, also run the controller's background service."""
    if server.endswith("engine"):
        import_module("torch")  # as a real engine does at its start: an import in the first join would be a stall
    if server != "controller":
        yield application(server, directory)
        return
    from pipelinerl.controller.service.api import create_api
    from tests.controller.service.test_service import running

    async with running(directory) as run:
        yield create_api(run.service, token=TOKEN)


def not_run_s():
    """Return the seconds for which the main thread, which runs the event loop, waited for a core."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


async def watch(file):
    longest = 0.0
    while True:
        began, not_run = time.monotonic(), not_run_s()
        await asyncio.sleep(_TICK_S)
        ended = time.monotonic()
        stall = ended - began - _TICK_S - (not_run_s() - not_run)
        if stall > longest:
            longest = stall
            draft = file.with_suffix(".new")
            draft.write_text(json.dumps([stall, began, ended]))
            draft.replace(file)


async def main(server, directory):
    """Serve until killed; everything written to stderr, also by libraries, goes to a file in the directory."""
    os.dup2(os.open(directory / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), sys.stderr.fileno())
    with listen("127.0.0.1", 0) as bound:
        async with at_work(server, directory) as app:
            watching = asyncio.create_task(watch(directory / "stall"))
            print(bound.getsockname()[1], flush=True)
            await serve_until(app, bound)
            watching.cancel()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Path(sys.argv[2])))
