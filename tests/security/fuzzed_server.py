"""One server as its own process: the target of a fuzzing campaign, or the idle server that it is compared with.

python -m tests.security.fuzzed_server SERVER DIRECTORY      prints its port, serves until it is killed
"""

import os
import sys
from contextlib import asynccontextmanager
from importlib import import_module
from pathlib import Path

import uvloop

from pipelinerl.system.http_service import listen, serve_until
from tests.security.servers import TOKEN, application


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


async def main(server, directory):
    """Serve until killed; everything written to stderr, also by libraries, goes to a file in the directory."""
    os.dup2(os.open(directory / "stderr", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), sys.stderr.fileno())
    with listen("127.0.0.1", 0) as bound:
        async with at_work(server, directory) as app:
            print(bound.getsockname()[1], flush=True)
            await serve_until(app, bound)


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1], Path(sys.argv[2])))
