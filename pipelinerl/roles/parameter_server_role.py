"""A parameter server's process: its memory, its persistent copy, its routes."""

from __future__ import annotations

from pipelinerl.http_service import listen, serve_until
from pipelinerl.roles.process import Identity
from pipelinerl.weights.parameter_server import ParameterServer, create_app
from pipelinerl.weights.puller import WeightPuller
from pipelinerl.weights.snapshot_store import SnapshotStore
from pipelinerl.weights.version_table import VersionTable


async def run(identity: Identity) -> None:
    """Serve until the process is told to stop; begins with what it saved in an earlier life."""
    config = identity.config.parameter_server
    place = config.copies or str(identity.run_dir / "weights")
    with listen(identity.host, identity.port) as listener:
        server = ParameterServer(
            VersionTable(room=config.versions),
            puller=WeightPuller(token=identity.token),
            store=SnapshotStore(f"{place.rstrip('/')}/{identity.name}"),
        )
        await serve_until(create_app(server, token=identity.token), listener)
