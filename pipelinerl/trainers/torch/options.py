"""`TorchOptions`, the recipe's `trainer.options` for the torch trainer; parsing needs no torch.

[trainer]
options.mesh = { dp_shard = 2, cp = 2 }
options.gradients = "divided"
options.experts = "parallel"
options.attention = "buckets"
options.compile = false
options.lora = { rank = 16, alpha = 32, targets = "all-linear", dropout = 0 }     # these are the defaults
options.optimizer = { moments = "bf16", place = "host" }                          # default: fp32, device
# set by `pipelinerl run`:
options.distributed = { coordinator = "10.0.0.1:8476", token_file = "/shared/token" }
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

from pipelinerl.trainers.option_table import one_of, refuse_unknown, table, whole
from pipelinerl.trainers.ranks.rendezvous import Distributed, read_distributed
from pipelinerl.trainers.torch.mesh import ExpertWeights, GradientSum, ProcessMesh
from pipelinerl.trainers.torch.packed.attention_choice import SegmentAttention
from trainer_contract.errors import SpecError

_NAME: Final = "torch"
_LORA: Final = "options.lora"
_OPTIMIZER: Final = "options.optimizer"
#: Value of `options.lora.targets` that stands for all linear layers except the output layer.
ALL_LINEAR: Final = "all-linear"


class MomentDType(StrEnum):
    """Dtype of AdamW's two moments between steps; a step is always computed in fp32."""

    FP32 = "fp32"
    BF16 = "bf16"
    """Half the memory; stochastic rounding lets small changes accumulate."""


class StatePlace(StrEnum):
    """Placement of the optimizer's state between steps."""

    DEVICE = "device"
    HOST = "host"
    """In host memory; the device holds the weights of the passes, and one piece of the state at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """Options of the optimizer; the defaults are torch's own AdamW with fp32 moments on the device."""

    moments: MomentDType = MomentDType.FP32
    place: StatePlace = StatePlace.DEVICE


def optimizer_of(options: Mapping[str, Any]) -> OptimizerOptions:
    """Parse the optimizer options of `TrainerSpec.options`. Raises SpecError for an unknown key or value."""
    given = table(options.get("optimizer", {}), OptimizerOptions, _OPTIMIZER, trainer=_NAME)
    moments, place = given.get("moments", MomentDType.FP32), given.get("place", StatePlace.DEVICE)
    return OptimizerOptions(
        moments=one_of(MomentDType, moments, f"{_OPTIMIZER}.moments"),
        place=one_of(StatePlace, place, f"{_OPTIMIZER}.place"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """LoRA replaces W by W + (alpha / rank) · B A (Hu et al. 2021, arXiv 2106.09685); B [out, rank] starts at 0.

    `targets` are the last components of module names, such as `q_proj`; None means all linear layers except the output
    layer. Alpha stays 32 for every rank, so that the best learning rate hardly depends on the rank (Schulman et al.
    2025, LoRA Without Regret).
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] | None = None
    dropout: float = 0.0


_LORA_DEFAULTS: Final = LoraOptions()


def lora_of(options: Mapping[str, Any]) -> LoraOptions | None:
    """Parse the LoRA options of `TrainerSpec.options`; None if absent. Raises SpecError if invalid or without peft."""
    if options.get("lora") is None:
        return None
    given = table(options["lora"], LoraOptions, _LORA, trainer=_NAME)
    if importlib.util.find_spec("peft") is None:
        raise SpecError(f"{_LORA} needs peft, which is not installed; pip install -e '.[lora]'")
    return LoraOptions(
        rank=whole(given.get("rank", _LORA_DEFAULTS.rank), f"{_LORA}.rank", least=1),
        alpha=_number(given.get("alpha", _LORA_DEFAULTS.alpha), "alpha", above=0.0),
        targets=_targets(given.get("targets", ALL_LINEAR)),
        dropout=_number(given.get("dropout", _LORA_DEFAULTS.dropout), "dropout", least=0.0, below=1.0),
    )


def _number(
    value: Any, name: str, *, above: float | None = None, least: float | None = None, below: float | None = None
) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    lies_above = is_number and (above is None or value > above) and (least is None or value >= least)
    if lies_above and (below is None or value < below):
        return float(value)
    bounds = {"above": above, "at least": least, "below": below}
    expected = " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if bound is not None)
    raise SpecError(f"{_LORA}.{name} must be a number {expected}, got {value!r}")


def _targets(value: Any) -> tuple[str, ...] | None:
    if value == ALL_LINEAR:
        return None
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return tuple(sorted(set(value)))
    raise SpecError(f'{_LORA}.targets must be "{ALL_LINEAR}" or a list of modules\' names, got {value!r}')


def share_of(trained: int, whole: int) -> str:
    """Return the number of trained and of all parameters as text: `1.2 M of 135 M parameters train`."""
    return f"{_short(trained)} of {_short(whole)} parameters train"


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)


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
    """Parse `TrainerSpec.options`, except `distributed`. Raises SpecError."""
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
