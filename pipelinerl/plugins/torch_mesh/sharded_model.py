"""`ShardedModel`, a packed model whose parameters are sharded over a mesh of processes with torch's `fully_shard`.

Each layer's parameters are gathered when the layer computes, and then freed. Gradients are summed over the processes
into fp32 shards, never averaged, because token weights are computed on the whole batch.

`ShardedModel.shards` keeps this process's shards as plain tensors, which share memory with the model's parameters. The
model's own methods do not suffice: during a pass, `named_parameters` returns whole gathered parameters, and calling
`state_dict` would free them. Other threads read the shards through `last_step_shards`. It returns the weights after
the last optimizer step, even while a pass computes with other weights, which `lent` has put into the model. On a GPU,
reads run on their own stream. They wait for the last write to the shards, but not for the passes queued after it.

With expert parallelism, each process holds some experts, and transformers' `AllToAllEP` sends each token to the process
that holds its expert, by two differentiable all-to-alls per layer. After backward, an expert's gradient covers the
tokens of all processes that share its copy of the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any, Final, cast

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from pipelinerl.trainers.torch.adamw import to_device
from pipelinerl.trainers.torch.experts import fused_experts
from pipelinerl.trainers.torch.mesh import ExpertWeights, ProcessMesh, refuse_uneven_experts
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed_model import PackedModel, PackedValueModel, computing_in, hold
from pipelinerl.weights.torch_transfer import stream_for
from trainer_contract.errors import SpecError

dist: Any = torch.distributed
_SHARD: Final = "dp_shard"
_COPY: Final = "dp_replicate"
#: Number of parts into which a layer is divided when weights are gathered for engines.
_PARTS: Final = 4


class ShardedModel:
    """A sharded model. Every process calls it, at the same time, like the model itself."""

    def __init__(
        self,
        model: PackedModel | PackedValueModel,
        mesh: ProcessMesh,
        *,
        device: torch.device,
        compute: torch.dtype,
        parameters: Mapping[str, nn.Parameter] | None = None,
        experts: ExpertWeights = ExpertWeights.GATHERED,
    ) -> None:
        """Shard `model`, the same on every process, layer by layer; parameters on the meta device get memory on
        `device`, which the caller fills. `compute` is the dtype of matmuls. Raises SpecError on every process if
        experts cannot be divided.
        """
        self.model = model
        named = dict(model.named_weights()) if parameters is None else parameters
        places = {id(parameter): place for place, parameter in model.named_parameters()}
        self._device, self._compute = device, compute
        self._mesh = device_mesh(device.type, mesh.dp_replicate, mesh.shards)
        self._copies = None if mesh.dp_replicate == 1 else self._mesh.get_group(_COPY)
        self.group = None if mesh.cp == 1 else sequence_group(device.type, mesh.width, mesh.cp)
        self.shapes = {name: parameter.shape for name, parameter in named.items()}
        sizes = [[each.numel() for each in layer.parameters()] for layer in _layers(model)]
        #: Number of elements gathered per command: a quarter of a layer, because one part is read while two others
        #: arrive; or the layer's largest parameter, if that is larger.
        self.at_once = max((max(*each, sum(each) // _PARTS) for each in sizes), default=0)
        staying = keep_own_experts(model, mesh, device) if experts is ExpertWeights.PARALLEL else set()
        for module in [*_layers(model), model]:
            whole = [each for each in module.parameters() if not (isinstance(each, DTensor) or each in staying)]
            for parameter in whole:
                if parameter.is_meta:
                    hold(parameter, torch.empty_like(parameter, device=device))
            fully_shard(module, mesh=self._mesh, ignored_params=staying)
            for parameter in whole:  # other references to whole parameters may remain; free their memory
                parameter.data = parameter.data.new_empty(0)
        register_fsdp_forward_method(model, "probe")
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        divided = dict(model.named_parameters())
        self._divided = {name: divided[places[id(parameter)]] for name, parameter in named.items()}
        #: This process's rows of every parameter, by name. If it has no row of a parameter, the tensor is empty.
        self.shards = {
            name: nn.Parameter(_own(each).detach(), requires_grad=each.requires_grad)
            for name, each in self._divided.items()
        }
        self._lasting = dict(self.shards)
        self._reading = threading.Lock()
        self._reads = stream_for(device)

    def __call__(self, *arguments: Any) -> Tensor:
        with computing_in(self._compute, self._device):
            return cast(Tensor, self.model(*arguments)).float()

    def probe(self, products: torch.dtype) -> None:
        try:
            self.model.probe(self._device, products)
        finally:
            self.end_forward()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        return {name: shard for name, shard in self.shards.items() if shard.requires_grad}

    def begin_backward(self, *, is_last: bool) -> None:
        """Prepare a backward pass; only with `is_last` does the pass sum the gradients over the processes."""
        cast(FSDPModule, self.model).set_requires_gradient_sync(is_last)

    def end_forward(self) -> None:
        """Free the gathered weights that gradient-free passes leave behind; the next optimizer step changes them."""
        for part in self._parts():
            part.reshard()

    def abandon(self) -> None:
        """Discard a forward pass that will have no backward pass, and all accumulated gradients."""
        cast(FSDPModule, self.model).reset_iter_state()
        self.discard_gradient()

    def collect_gradient(self) -> list[nn.Parameter]:
        """Attach each gradient to its shard, and return the nonempty shards that have one."""
        for name, divided in self._divided.items():
            gradient = None if divided.grad is None else _own(divided.grad)
            if gradient is not None and not isinstance(divided, DTensor) and self._copies is not None:
                # The experts of a replica processed only this replica's tokens.
                dist.all_reduce(gradient, group=self._copies)
            self.shards[name].grad = gradient
        return [shard for shard in self.shards.values() if shard.grad is not None and shard.numel()]

    def discard_gradient(self) -> None:
        for name, divided in self._divided.items():
            divided.grad = self.shards[name].grad = None

    def end_step(self) -> None:
        """Discard the gradient after an optimizer step, and let reads start as soon as the step has ended."""
        self.discard_gradient()
        with self._reading:
            self._reads.mark_start()

    def summed_over_shards(self, number: float) -> float:
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total, group=self._mesh.get_group(_SHARD))
        return float(total)

    @contextmanager
    def last_step_shards(self) -> Iterator[Mapping[str, Tensor]]:
        """Provide the rows after the last optimizer step; a GPU reads them on the block's stream. Thread-safe."""
        with self._reading, self._reads:
            yield self._lasting

    @contextmanager
    def lent(self, names: Iterable[str], rows_of: Callable[[str], Tensor]) -> Iterator[None]:
        """Within the block, give the named shards the values that `rows_of` returns; then restore their own values."""
        try:
            for name in names:
                shard = self.shards[name]
                values, own = rows_of(name), shard.detach().clone()
                with self._reading:
                    self._lasting[name] = nn.Parameter(own, requires_grad=False)
                    shard.detach().copy_(to_device(values, shard.device, shard.dtype))
                    self._reads.mark_start()
            yield
        finally:
            for name, shard in self.shards.items():
                with self._reading:
                    if self._lasting[name] is not shard:
                        shard.detach().copy_(self._lasting[name])
                        self._lasting[name] = shard
                        self._reads.mark_start()

    def _parts(self) -> Iterator[FSDPModule]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module


@cache
def device_mesh(device_type: str, dp_replicate: int, shards: int) -> DeviceMesh:
    """Return the mesh of all processes. It is cached, because each mesh creates process groups."""
    if dp_replicate == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=(_SHARD,))
    return init_device_mesh(device_type, (dp_replicate, shards), mesh_dim_names=(_COPY, _SHARD))


@cache
def sequence_group(device_type: str, width: int, cp: int) -> SequenceGroup:
    """Return the group of processes that share a micro-batch with this one; cached like `device_mesh`."""
    parts = init_device_mesh(device_type, (width, cp), mesh_dim_names=("part", "cp"))
    return SequenceGroup(parts.get_group("cp"), cp, parts.get_local_rank("cp"))


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: PackedModel | PackedValueModel) -> list[nn.Module]:
    names: Mapping[str, Any] | Any = model.model._no_split_modules or ()
    return [module for module in model.model.modules() if type(module).__name__ in names]


def keep_own_experts(model: nn.Module, mesh: ProcessMesh, device: torch.device) -> set[nn.Parameter]:
    """Keep only this process's experts in every layer, and let them process the tokens of all processes.

    Returns the parameters of the kept experts on the device, uninitialised if they were on the meta device. Raises
    SpecError on every process if tokens cannot be exchanged or experts cannot be divided evenly.
    """
    try:  # imported on demand, so that other options work with versions of transformers that lack it
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError as error:
        raise SpecError(
            f'options.experts = "parallel": transformers {version("transformers")} cannot exchange tokens between '
            'processes; install transformers 5.23, or use "gathered"'
        ) from error
    exchange = AllToAllEP
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


class _TravellingTokens:
    """Replacement for an experts module's forward: send each token to the processes of its experts and back."""

    def __init__(self, exchange: Callable[..., Tensor]) -> None:
        self._exchange = exchange

    def __call__(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        device = hidden.device.type
        sent = hidden.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else hidden
        return self._exchange(sent, chosen, weights).to(hidden.dtype)


@cache
def _expert_meshes(device_type: str, copies: int, shards: int) -> DeviceMesh:
    return init_device_mesh(device_type, (copies, shards, 1), mesh_dim_names=("copy", "experts", "alone"))
