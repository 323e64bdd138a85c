"""`ShardedModel`: a packed model whose parameters are divided over a mesh of processes, by torch's `fully_shard`.

Each layer's parameters are gathered where they are used and dropped again; gradients are summed over the processes in
the last backward of a sequence, or in each, into fp32 shards. Weights of a batch are computed on all of it, so
gradients are summed and never averaged.

The shards are held from the start, as plain tensors over the memory that passes read: while a pass runs,
`named_parameters` shows whole parameters, and `state_dict` would take them away from it. So other threads read the
shards here, and see what the last optimizer step left even while other weights are lent to the passes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, Final, cast, final

import torch
import torch.distributed
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from pipelinerl.trainers.torch.experts.parallel import keep_own_experts
from pipelinerl.trainers.torch.mesh import ExpertWeights, ProcessMesh
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup
from pipelinerl.trainers.torch.packed_model import PackedModel, computing_in, hold
from pipelinerl.trainers.torch.value_model import PackedValueModel

dist: Any = torch.distributed
_SHARD: Final = "dp_shard"
_COPY: Final = "dp_replicate"
#: Of a layer, each gathered by a command of its own.
_PARTS: Final = 4


@final
class ShardedModel:
    """Called like the model itself, by every process at once."""

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
        """Divide `model`, the same on every process, layer by layer.

        What is on the meta device has memory on `device` afterwards, and no values: whoever made it fills the shards.

        Args:
            compute: dtype of products.
            parameters: the model's, by the names that they are known by; None takes the model's own.
            experts: where experts compute; those that stay where they lie are not `fully_shard`'s.

        Raises:
            SpecError: the processes cannot divide the experts; on every process alike.
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
        #: Numbers that one command gathers: a quarter of a layer, since one is read while two others come, or its
        #: largest parameter where that is more.
        self.at_once = max((max(*each, sum(each) // _PARTS) for each in sizes), default=0)
        staying = keep_own_experts(model, mesh, device) if experts is ExpertWeights.PARALLEL else set()
        for module in [*_layers(model), model]:
            whole = [each for each in module.parameters() if not (isinstance(each, DTensor) or each in staying)]
            for parameter in whole:
                if parameter.is_meta:
                    hold(parameter, torch.empty_like(parameter, device=device))
            fully_shard(module, mesh=self._mesh, ignored_params=staying)
            for parameter in whole:  # whoever still holds a whole one holds nothing
                parameter.data = parameter.data.new_empty(0)
        register_fsdp_forward_method(model, "probe")
        for part in self._parts():
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)
        divided = dict(model.named_parameters())
        self._divided = {name: divided[places[id(parameter)]] for name, parameter in named.items()}
        #: Of all parameters, by name: the memory of this process' rows. Without a row it is empty.
        self.shards = {
            name: nn.Parameter(_own(each).detach(), requires_grad=each.requires_grad)
            for name, each in self._divided.items()
        }
        self._lasting = dict(self.shards)
        self._reading = threading.Lock()

    def __call__(self, *arguments: Any) -> Tensor:
        """`PackedModel.forward`, in fp32 whatever it is computed in."""
        with computing_in(self._compute, self._device):
            return cast(Tensor, self.model(*arguments)).float()

    def probe(self, products: torch.dtype) -> None:
        """`PackedModel.probe`, by every process at once. Raises SpecError, on every one of them."""
        try:
            self.model.probe(self._device, products)
        finally:
            self.end_forward()

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The shards that the optimizer steps, by name."""
        return {name: shard for name, shard in self.shards.items() if shard.requires_grad}

    def begin_backward(self, *, is_last: bool) -> None:
        """Gradients are brought together in the last backward of a sequence, in none before.

        Where each is said to be the last, a process accumulates its own rows of them alone.
        """
        cast(FSDPModule, self.model).set_requires_gradient_sync(is_last)

    def end_forward(self) -> None:
        """Drop what passes without a gradient have left gathered: it would outlive the weights that it is of."""
        for part in self._parts():
            part.reshard()

    def abandon(self) -> None:
        """Forget a pass whose backward will not come, and what earlier sequences have accumulated."""
        cast(FSDPModule, self.model).reset_iter_state()
        self.discard_gradient()

    def collect_gradient(self) -> list[nn.Parameter]:
        """The shards that have a gradient, with it."""
        for name, divided in self._divided.items():
            gradient = None if divided.grad is None else _own(divided.grad)
            if gradient is not None and not isinstance(divided, DTensor) and self._copies is not None:
                dist.all_reduce(gradient, group=self._copies)  # each copy's experts have seen its own tokens
            self.shards[name].grad = gradient
        return [shard for shard in self.shards.values() if shard.grad is not None and shard.numel()]

    def discard_gradient(self) -> None:
        """Forget what was accumulated."""
        for name, divided in self._divided.items():
            divided.grad = self.shards[name].grad = None

    def summed_over_shards(self, number: float) -> float:
        """The sum of each shard's number, the same on every process."""
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total, group=self._mesh.get_group(_SHARD))
        return float(total)

    @contextmanager
    def at_rest(self) -> Iterator[Mapping[str, Tensor]]:
        """Within it this process' rows are as the last optimizer step left them, and written by nobody; any thread."""
        with self._reading:
            yield self._lasting

    @contextmanager
    def lent(self, names: Iterable[str], rows_of: Callable[[str], Tensor]) -> Iterator[None]:
        """Give these shards other values, asked for one by one; afterwards, whatever happened, their own."""
        try:
            for name in names:
                shard = self.shards[name]
                values, own = rows_of(name), shard.detach().clone()
                with self._reading:
                    self._lasting[name] = nn.Parameter(own, requires_grad=False)
                    shard.detach().copy_(values)
            yield
        finally:
            for name, shard in self.shards.items():
                with self._reading:
                    if self._lasting[name] is not shard:
                        shard.detach().copy_(self._lasting[name])
                        self._lasting[name] = shard

    def _parts(self) -> Iterator[FSDPModule]:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                yield module


@cache
def device_mesh(device_type: str, dp_replicate: int, shards: int) -> DeviceMesh:
    """The mesh of all processes, which the trainers of a process share: each makes groups of its own."""
    if dp_replicate == 1:
        return init_device_mesh(device_type, (shards,), mesh_dim_names=(_SHARD,))
    return init_device_mesh(device_type, (dp_replicate, shards), mesh_dim_names=(_COPY, _SHARD))


@cache
def sequence_group(device_type: str, width: int, cp: int) -> SequenceGroup:
    """The processes that compute a micro-batch together with this one; shared like `device_mesh`."""
    parts = init_device_mesh(device_type, (width, cp), mesh_dim_names=("part", "cp"))
    return SequenceGroup(parts.get_group("cp"), cp, parts.get_local_rank("cp"))


def _own(tensor: Tensor) -> Tensor:
    """This process' rows."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _layers(model: PackedModel | PackedValueModel) -> list[nn.Module]:
    """The modules that transformers says are never to be split: a decoder's layers."""
    names: Mapping[str, Any] | Any = model.model._no_split_modules or ()
    return [module for module in model.model.modules() if type(module).__name__ in names]
