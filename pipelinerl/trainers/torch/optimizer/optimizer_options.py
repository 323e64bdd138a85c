"""`OptimizerOptions`: what a recipe's `trainer.options.optimizer` may say, read without guessing and without torch.

[trainer]
options.optimizer = { moments = "fp32", place = "device" }     # these are the defaults
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, TypeVar

from pipelinerl.trainers.option_table import table
from trainer_contract.errors import SpecError

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


_Choice = TypeVar("_Choice", bound=StrEnum)


def optimizer_of(options: Mapping[str, Any]) -> OptimizerOptions:
    """What `TrainerSpec.options` say of the optimizer's state.

    Raises:
        SpecError: an unknown key, or a value that is none of those there are.
    """
    given = table(options.get("optimizer", {}), OptimizerOptions, _WHERE, trainer="torch")
    return OptimizerOptions(
        moments=_chosen(given, "moments", MomentDType.FP32), place=_chosen(given, "place", StatePlace.DEVICE)
    )


def _chosen(given: Mapping[str, Any], name: str, default: _Choice) -> _Choice:
    kind = type(default)
    value = given.get(name, default)
    if value not in tuple(kind):
        raise SpecError(f"{_WHERE}.{name} must be {' or '.join(kind)}, got {value!r}")
    return kind(value)
