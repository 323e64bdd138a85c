"""Expert parallelism: tokens travel to the process that has their expert, rather than experts to every process.

Which process holds which experts is what `fully_shard` would have made of their rows, so reading, gathering and saving
know nothing of it. The way to the experts and back is transformers' own (`AllToAllEP`): two exchanges a layer, all to
all, which autograd follows. Once every process has gone back, its experts have the gradient of the tokens of all that
share a copy of the model with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers.distributed.expert_parallel import AllToAllEP

from pipelinerl.trainers.torch.experts.autocast import fused_experts
from pipelinerl.trainers.torch.mesh import ProcessMesh, refuse_uneven_experts
from pipelinerl.trainers.torch.packed_model import hold


def keep_own_experts(model: nn.Module, mesh: ProcessMesh, device: torch.device) -> set[nn.Parameter]:
    """Have this process keep its rows of every layer's experts, and compute them for the tokens of all.

    Returns:
        The experts' parameters, which are its rows on the device, without values where they were on the meta device.

    Raises:
        SpecError: there are no experts, or the processes cannot divide them evenly; on every process alike.
    """
    modules, kept = fused_experts(model), set[nn.Parameter]()
    refuse_uneven_experts(modules[0].num_experts if modules else 0, mesh.shards)
    meshes = _expert_meshes(device.type, mesh.dp_replicate, mesh.shards)
    for module in modules:
        rows = mesh.rows_of(meshes["experts"].get_local_rank(), module.num_experts)
        module.num_experts = rows.stop - rows.start
        for whole in module.parameters(recurse=False):
            own = torch.empty((module.num_experts, *whole.shape[1:]), dtype=whole.dtype, device=device)
            if not whole.is_meta:
                own.copy_(whole.detach()[rows])
            hold(whole, own)
            kept.add(whole)
        module.forward = _TravellingTokens(AllToAllEP(module, meshes["experts"], meshes["alone"]))
    return kept


@final
class _TravellingTokens:
    """Forward of a module of experts that sends each token to the processes that have its experts, and back.

    Under autocast tokens travel in its dtype, which the experts would cast them to.
    """

    def __init__(self, exchange: Callable[..., Tensor]) -> None:
        self._exchange = exchange

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        device = hidden.device.type
        sent = hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden
        return self._exchange(sent, chosen, weights).to(hidden.dtype)


@cache
def _expert_meshes(device_type: str, copies: int, shards: int) -> DeviceMesh:
    """All processes; `experts` are those that divide a copy of the model, `alone` is a process by itself."""
    return init_device_mesh(device_type, (copies, shards, 1), mesh_dim_names=("copy", "experts", "alone"))
