"""`LoraOptions`, the recipe's `trainer.options.lora`; parsing needs no torch.

[trainer]
options.lora = { rank = 16, alpha = 32, targets = "all-linear", dropout = 0 }     # these are the defaults
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelinerl.trainers.option_table import table, whole
from trainer_contract.errors import SpecError

_WHERE: Final = "options.lora"
#: Value of `targets` that stands for all linear layers except the output layer.
ALL_LINEAR: Final = "all-linear"


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


_DEFAULT: Final = LoraOptions()


def lora_of(options: Mapping[str, Any]) -> LoraOptions | None:
    """Parse the LoRA options of `TrainerSpec.options`; None if absent. Raises SpecError if invalid or without peft."""
    if options.get("lora") is None:
        return None
    given = table(options["lora"], LoraOptions, _WHERE, trainer="torch")
    if importlib.util.find_spec("peft") is None:
        raise SpecError(f"{_WHERE} needs peft, which is not installed; pip install -e '.[lora]'")
    return LoraOptions(
        rank=whole(given.get("rank", _DEFAULT.rank), f"{_WHERE}.rank", least=1),
        alpha=_number(given.get("alpha", _DEFAULT.alpha), "alpha", above=0.0),
        targets=_targets(given.get("targets", ALL_LINEAR)),
        dropout=_number(given.get("dropout", _DEFAULT.dropout), "dropout", least=0.0, below=1.0),
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
    raise SpecError(f"{_WHERE}.{name} must be a number {expected}, got {value!r}")


def _targets(value: Any) -> tuple[str, ...] | None:
    if value == ALL_LINEAR:
        return None
    if isinstance(value, list | tuple) and value and all(isinstance(name, str) and name for name in value):
        return tuple(sorted(set(value)))
    raise SpecError(f'{_WHERE}.targets must be "{ALL_LINEAR}" or a list of modules\' names, got {value!r}')


def share_of(trained: int, whole: int) -> str:
    """Return the number of trained and of all parameters as text: `1.2 M of 135 M parameters train`."""
    return f"{_short(trained)} of {_short(whole)} parameters train"


def _short(count: int) -> str:
    for unit, name in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return str(count)
