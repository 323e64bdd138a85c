"""`OptimizerOptions`, the recipe's `trainer.options.optimizer`; parsing needs no torch.

[trainer]
options.optimizer = { moments = "fp32", place = "device" }     # these are the defaults
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from pipelinerl.trainers.option_table import one_of, table

_WHERE: Final = "options.optimizer"


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
    given = table(options.get("optimizer", {}), OptimizerOptions, _WHERE, trainer="torch")
    moments, place = given.get("moments", MomentDType.FP32), given.get("place", StatePlace.DEVICE)
    return OptimizerOptions(
        moments=one_of(MomentDType, moments, f"{_WHERE}.moments"), place=one_of(StatePlace, place, f"{_WHERE}.place")
    )
