"""Expert parallelism: tokens are sent to the process that holds their expert, instead of gathering experts.

Experts are divided over processes by rows, as `fully_shard` would do, so reading, gathering and saving need no changes.
The exchange is transformers' own (`AllToAllEP`): two all-to-alls per layer, which autograd follows. After the backward
pass of every process, an expert's gradient covers the tokens of all processes that share its copy of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from pipelinerl.trainers.torch.experts.autocast import fused_experts
from pipelinerl.trainers.torch.mesh import ProcessMesh, refuse_uneven_experts
from pipelinerl.trainers.torch.packed_model import hold
from trainer_contract.errors import SpecError


def keep_own_experts(model: nn.Module, mesh: ProcessMesh, device: torch.device) -> set[nn.Parameter]:
    """Reduce every layer's experts to this process's rows, and make them process the tokens of all processes.

    Returns:
        The experts' parameters: this process's rows on the device, without values if they were on the meta device.

    Raises:
        SpecError: transformers cannot exchange tokens, there are no experts, or they cannot be divided evenly;
            raised on every process.
    """
    exchange = _token_exchange()
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
        module.forward = _TravellingTokens(exchange(module, meshes["experts"], meshes["alone"]))
    return kept


def _token_exchange() -> Any:
    """Return `AllToAllEP`. Raises SpecError if this transformers does not have it."""
    try:  # on demand, so that other trainers run with a transformers that lacks it
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError as error:
        raise SpecError(
            f'options.experts = "parallel": transformers {version("transformers")} cannot exchange tokens between '
            'processes; install transformers 5.23, or use "gathered"'
        ) from error
    return AllToAllEP


@final
class _TravellingTokens:
    """Forward of an experts module that sends each token to the processes that hold its experts, and back.

    Under autocast, tokens are sent in autocast's dtype, which the experts would cast them to anyway.
    """

    def __init__(self, exchange: Callable[..., Tensor]) -> None:
        self._exchange = exchange

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        device = hidden.device.type
        sent = hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden
        return self._exchange(sent, chosen, weights).to(hidden.dtype)


@cache
def _expert_meshes(device_type: str, copies: int, shards: int) -> DeviceMesh:
    """Return a mesh of all processes: `experts` share a copy of the model, `alone` is a single process."""
    return init_device_mesh(device_type, (copies, shards, 1), mesh_dim_names=("copy", "experts", "alone"))
