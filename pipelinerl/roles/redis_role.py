"""The embedded stream server's process: it becomes the server."""

from __future__ import annotations

import os

from pipelinerl.roles.process import Identity
from pipelinerl.streams.embedded_redis import command
from pipelinerl.system.http_service import listen


def run(identity: Identity) -> None:
    """Replace this process by the server, with its data below the run's directory; does not return.

    Raises:
        AddressError: the port is taken, or no such address is here; the server would say so in its log alone.
    """
    listen(identity.host, identity.port).close()
    argv = command(identity.run_dir / "redis", identity.port, host=identity.host)
    os.execv(argv[0], argv)
