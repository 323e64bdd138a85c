"""Sweeps: which settings to simulate, and which of them to recommend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final, final

from pipelinerl.errors import UserError
from pipelinerl.simulation.prediction import Prediction

#: Settings slower than the fastest by at most this share count as equally fast.
_AS_FAST: Final = 0.05


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A setting of the recipe, by its changes `section.key=value`, with its prediction, or the reason why it cannot
    run.
    """

    changes: tuple[str, ...]
    engines: int = 0
    prediction: Prediction | None = None
    refusal: str = ""


def grid(axes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return all combinations of the values of `section.key=value,value,…`; the first axis changes slowest.

    Without axes, return the unchanged recipe.

    Raises:
        UserError: an axis is not of this form.
    """
    values: list[list[str]] = []
    for axis in axes:
        key, separator, several = axis.partition("=")
        if not (separator and "." in key and all(value.strip() for value in several.split(","))):
            raise UserError(f"--sweep takes section.key=value,value,… such as engine.count=1,2,4, got {axis!r}")
        values.append([f"{key.strip()}={value.strip()}" for value in several.split(",")])
    return list(product(*values))


def recommended(trials: Sequence[Trial]) -> Trial | None:
    """Return the cheapest of the trials that are nearly as fast as the fastest; among equally cheap trials the
    freshest.

    Without prices, the trial with the fewest engines counts as the cheapest. None if no trial can run.
    """
    ran = [(trial, trial.prediction) for trial in trials if trial.prediction is not None]
    if not ran:
        return None
    enough = (1 - _AS_FAST) * max(prediction.tokens_per_s for _, prediction in ran)
    fast = [(trial, prediction) for trial, prediction in ran if prediction.tokens_per_s >= enough]
    best = min(
        fast, key=lambda each: (each[1].cost_per_million_tokens, each[0].engines, round(each[1].staleness_mean, 1))
    )
    return best[0]
