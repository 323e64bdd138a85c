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
from dataclasses import dataclass, fields
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
    """Options of the torch trainer, which all its processes share."""

    mesh: ProcessMesh
    gradients: GradientSum
    experts: ExpertWeights
    attention: SegmentAttention
    compile: bool | None
    """True if layers are compiled; None lets the trainer choose."""
    lora: LoraOptions | None
    optimizer: OptimizerOptions


def options_of(options: Mapping[str, Any]) -> TorchOptions:
    """Parse `TrainerSpec.options`, except `distributed`.

    Raises SpecError for an unknown key, a wrong type, or an impossible mesh.
    """
    known = [*(field.name for field in fields(TorchOptions)), "distributed"]
    refuse_unknown(options, known, "options", trainer=_NAME)
    axes = table(options.get("mesh", {}), ProcessMesh, "options.mesh", trainer=_NAME)
    mesh = ProcessMesh(**{name: whole(value, f"options.mesh.{name}", least=1) for name, value in axes.items()})
    experts = one_of(ExpertWeights, options.get("experts", ExpertWeights.GATHERED), "options.experts")
    if experts is ExpertWeights.PARALLEL and mesh.shards == 1:
        raise SpecError('options.experts = "parallel" needs a sharded model; set options.mesh.dp_shard=2')
    compiles = options.get("compile")
    if compiles is not None and not isinstance(compiles, bool):
        raise SpecError(f"options.compile must be true or false, got {compiles!r}")
    if compiles and mesh.size > 1:
        raise SpecError("options.compile is for a trainer of one process, but options.mesh has several; leave it out")
    return TorchOptions(
        mesh=mesh,
        gradients=one_of(GradientSum, options.get("gradients", GradientSum.WHOLE), "options.gradients"),
        experts=experts,
        attention=one_of(SegmentAttention, options.get("attention", SegmentAttention.AUTO), "options.attention"),
        compile=compiles,
        lora=lora_of(options),
        optimizer=optimizer_of(options),
    )


def distributed_of(options: Mapping[str, Any], mesh: ProcessMesh) -> Distributed | None:
    """Parse `distributed`; None for a mesh of one process. Raises SpecError if it does not fit the mesh."""
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
    return None if distributed is None else read_distributed(distributed, trainer=_NAME, processes=mesh.size)
