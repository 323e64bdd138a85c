"""The process of a parameter server: keeps weight versions in memory and on disk, and serves them over HTTP."""

from __future__ import annotations

import asyncio

from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.parameter_server.server import ParameterServer, create_app
from pipelinerl.plugins.parameter_server.version_table import SnapshotStore, VersionTable
from pipelinerl.roles.process import Identity
from pipelinerl.system.http_service import listen, serve_until


async def run(identity: Identity) -> None:
    """Serve weights until the process is stopped, beginning with versions that an earlier process saved in this run."""
    config = identity.config.parameter_server
    with listen(identity.host, identity.port) as listener:
        server = ParameterServer(
            VersionTable(room=config.versions),
            puller=WeightPuller(token=identity.token),
            store=await asyncio.to_thread(store_of, identity),
        )
        await serve_until(create_app(server, token=identity.token), listener)


def store_of(identity: Identity) -> SnapshotStore:
    """Return the store of weight versions in the run's directory, or at `parameter_server.copies`.

    Versions that another run of this name left at `copies` are deleted, so that they are not served as this run's. To
    recognise its own store, a run records the store's address in a file of its directory.
    """
    copies, own = identity.config.parameter_server.copies, identity.run_dir / "weights"
    if copies is None:
        return SnapshotStore(str(own / identity.name))
    store = SnapshotStore(f"{copies.rstrip('/')}/{identity.config.run.name}/{identity.name}")
    ours = own / f"{identity.name}.place"
    if not ours.exists() or ours.read_text() != store.place:
        store.clear()
        ours.parent.mkdir(parents=True, exist_ok=True)
        ours.write_text(store.place)
    return store
