"""The torch trainer on several processes, which share parameters, experts and sequences (`options.mesh`)."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import MeshComponent

COMPONENT: Final = MeshComponent(
    build="pipelinerl.plugins.torch_mesh.leader:MeshLeader",
    rank="pipelinerl.plugins.torch_mesh.mesh_worker:as_rank",
    launched=True,
)
