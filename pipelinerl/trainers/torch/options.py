"""`TorchOptions`, the recipe's `trainer.options` for the torch trainer.

[trainer]
options.mesh = { dp_shard = 2, cp = 2 }
options.gradients = "divided"
options.experts = "parallel"
options.attention = "buckets"
options.compile = false
options.lora = { rank = 16, alpha = 32, targets = "all-linear", dropout = 0 }
options.optimizer = { moments = "bf16", place = "host" }
# set by `pipelinerl run`:
options.distributed = { coordinator = "10.0.0.1:8476", token_file = "/shared/token" }
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from pipelinerl.trainers.option_table import one_of, refuse_unknown, table, whole
from pipelinerl.trainers.ranks.rendezvous import Distributed, read_distributed
from pipelinerl.trainers.torch.lora.lora_options import LoraOptions, lora_of
from pipelinerl.trainers.torch.mesh import ExpertWeights, GradientSum, ProcessMesh
from pipelinerl.trainers.torch.optimizer.optimizer_options import OptimizerOptions, optimizer_of
from pipelinerl.trainers.torch.packed.attention_choice import SegmentAttention
from trainer_contract.errors import SpecError

_NAME: Final = "torch"


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchOptions:
    """Options of the torch trainer; `distributed` is set if and only if the mesh has several processes."""

    mesh: ProcessMesh
    gradients: GradientSum = GradientSum.WHOLE
    experts: ExpertWeights = ExpertWeights.GATHERED
    attention: SegmentAttention = SegmentAttention.AUTO
    compile: bool | None = None
    lora: LoraOptions | None = None
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    distributed: Distributed | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> TorchOptions:
        """Parse `TrainerSpec.options`. Raises SpecError for an unknown key, a wrong type, or an impossible mesh."""
        mesh, lora, optimizer = checked(options)
        read = cls(
            mesh=mesh,
            gradients=gradients_of(options),
            experts=experts_of(options),
            attention=attention_of(options),
            compile=compile_of(options),
            lora=lora,
            optimizer=optimizer,
        )
        distributed = options.get("distributed")
        if mesh.size == 1 and distributed is not None:
            raise SpecError(
                "options.distributed is for several processes, but options.mesh has one; set options.mesh.dp_shard=2"
            )
        if mesh.size > 1 and distributed is None:
            raise SpecError(
                f"options.mesh makes {mesh.size} processes, but options.distributed does not name their meeting point; "
                'use `pipelinerl run`, which sets it, or add options.distributed={coordinator="127.0.0.1:8476"}'
            )
        if distributed is None:
            return read
        return replace(read, distributed=read_distributed(distributed, trainer=_NAME, processes=mesh.size))


def checked(options: Mapping[str, Any]) -> tuple[ProcessMesh, LoraOptions | None, OptimizerOptions]:
    """Validate all options except `distributed`; return mesh, LoRA and optimizer options. Raises SpecError."""
    gradients_of(options)
    experts_of(options)
    attention_of(options)
    compile_of(options)
    return mesh_of(options), lora_of(options), optimizer_of(options)


def gradients_of(options: Mapping[str, Any]) -> GradientSum:
    """Return the option `gradients`. Raises SpecError if it is not a `GradientSum`."""
    return one_of(GradientSum, options.get("gradients", GradientSum.WHOLE), "options.gradients")


def experts_of(options: Mapping[str, Any]) -> ExpertWeights:
    """Return the option `experts`. Raises SpecError if it is no `ExpertWeights`, or needs a sharded model."""
    experts = one_of(ExpertWeights, options.get("experts", ExpertWeights.GATHERED), "options.experts")
    if experts is ExpertWeights.PARALLEL and mesh_of(options).shards == 1:
        raise SpecError('options.experts = "parallel" needs a sharded model; set options.mesh.dp_shard=2')
    return experts


def attention_of(options: Mapping[str, Any]) -> SegmentAttention:
    """Return the option `attention`. Raises SpecError if it is not a `SegmentAttention`."""
    return one_of(SegmentAttention, options.get("attention", SegmentAttention.AUTO), "options.attention")


def compile_of(options: Mapping[str, Any]) -> bool | None:
    """Return the `compile` option; None lets the trainer choose. Raises SpecError if it is invalid for this mesh."""
    value = options.get("compile")
    if value is not None and not isinstance(value, bool):
        raise SpecError(f"options.compile must be true or false, got {value!r}")
    if value and mesh_of(options).size > 1:
        raise SpecError("options.compile is for a trainer of one process, but options.mesh has several; leave it out")
    return value


def mesh_of(options: Mapping[str, Any]) -> ProcessMesh:
    """Return the mesh from the options. Raises SpecError if it is impossible, or an option is unknown."""
    refuse_unknown(options, [field.name for field in fields(TorchOptions)], "options", trainer=_NAME)
    axes = table(options.get("mesh", {}), ProcessMesh, "options.mesh", trainer=_NAME)
    return ProcessMesh(**{name: whole(value, f"options.mesh.{name}", least=1) for name, value in axes.items()})
