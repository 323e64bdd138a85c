"""`OptimizerOptions`: what a recipe's `trainer.options.optimizer` may say, read without guessing and without torch.

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
    """What AdamW's two moments are kept in between steps; a step is computed in fp32 always."""

    FP32 = "fp32"
    BF16 = "bf16"
    """Half of the memory, rounded at random so that what is small adds up."""


class StatePlace(StrEnum):
    """Where the optimizer's state lies between steps."""

    DEVICE = "device"
    HOST = "host"
    """In the host's memory; the device holds what passes compute with, and a piece of the state at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerOptions:
    """The defaults are torch's own AdamW over fp32 moments on the device."""

    moments: MomentDType = MomentDType.FP32
    place: StatePlace = StatePlace.DEVICE


def optimizer_of(options: Mapping[str, Any]) -> OptimizerOptions:
    """What `TrainerSpec.options` say of the optimizer's state.

    Raises:
        SpecError: an unknown key, or a value that is none of those there are.
    """
    given = table(options.get("optimizer", {}), OptimizerOptions, _WHERE, trainer="torch")
    moments, place = given.get("moments", MomentDType.FP32), given.get("place", StatePlace.DEVICE)
    return OptimizerOptions(
        moments=one_of(MomentDType, moments, f"{_WHERE}.moments"), place=one_of(StatePlace, place, f"{_WHERE}.place")
    )
