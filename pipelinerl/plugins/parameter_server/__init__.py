"""Parameter servers: the trainer uploads weights, and each engine fetches them on its own (RLAX paper, §3.2)."""

from __future__ import annotations

from functools import partial
from typing import Final

from pipelinerl.component import TransportComponent
from pipelinerl.roles.role import Role, RoleOptions

COMPONENT: Final = TransportComponent(
    build="pipelinerl.plugins.parameter_server.publisher:publisher_of",
    fetch="pipelinerl.plugins.parameter_server.download:WeightPuller",
    watch="pipelinerl.plugins.parameter_server.watch:watch_of",
)


@partial(Role, name="parameter-server-0", port=8100, stop_order=3)
def parameter_server(options: RoleOptions) -> None:
    """Hold versions of the weights in memory, for engines to pull (weights.transport=pull)."""
    from pipelinerl.plugins.parameter_server.server import run
    from pipelinerl.roles.catalogue import run_role

    run_role("parameter-server", options, run)


ROLE: Final = parameter_server
