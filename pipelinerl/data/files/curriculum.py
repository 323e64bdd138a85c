"""`Curriculum`: training problems in the order of their difficulty, by the pass rates that a data set says of its rows.

A band moves over the problems as they are ranked from easy to hard, and the next problem is one of those within it:

    easy ┊······[=== band ===]··············┊ hard        the share of `over` that is through ─▶

The place of each problem is its rank plus noise as wide as the band; a band of 0 is the strict order, and a very wide
one is shuffled. Each problem comes once in an epoch's worth, whatever the band. After `over` problems the epochs are
shuffled, as without a curriculum. What comes when is a function of the seed and of the data alone, so that a run that
is resumed goes on where it was.

The curriculum is the one that RLAX §6.2 names beside pre-filtering; `pipelinerl prefilter` writes the pass rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from pipelinerl import rng
from pipelinerl.errors import RecipeError

#: Where `pipelinerl prefilter` writes it.
PASS_RATE: Final = "metadata.pass_rate"
#: What a recipe says of it.
ORDER: Final = ("order", "order_band", "order_over")
#: A range of the ranks.
_BAND: Final = 0.2
_MOST: Final = 10**8


class ProblemOrder(StrEnum):
    """In which order training problems come."""

    SHUFFLED = "shuffled"
    EASY_FIRST = "easy_first"
    HARD_FIRST = "hard_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """How training problems are ordered.

    Attributes:
        band: how wide the band is, as a share of the problems.
        over: problems of the sweep from one end to the other; None: as many as there are.
    """

    order: ProblemOrder = ProblemOrder.SHUFFLED
    band: float = _BAND
    over: int | None = None

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], *, where: str) -> Self:
        """What a recipe says, taken out of its `parameters`. Raises `RecipeError` for what is no order."""
        order, band, over = (parameters.pop(key, None) for key in ORDER)
        if order is not None and order not in list(ProblemOrder):
            raise RecipeError(f"{where}.parameters.order must be one of {', '.join(ProblemOrder)}, got {order!r}")
        if order in (None, ProblemOrder.SHUFFLED) and not (band is None and over is None):
            raise RecipeError(f"{where}.parameters.order_band and order_over need an order, such as easy_first")
        if band is not None and (isinstance(band, bool) or not isinstance(band, int | float) or not 0 <= band <= 1):
            raise RecipeError(f"{where}.parameters.order_band must be a share from 0 to 1, got {band!r}")
        if over is not None and (isinstance(over, bool) or not isinstance(over, int) or not 1 <= over <= _MOST):
            raise RecipeError(f"{where}.parameters.order_over must be a number of problems, got {over!r}")
        return cls(order=ProblemOrder(order or "shuffled"), band=_BAND if band is None else float(band), over=over)

    def sweep(self, rates: NDArray[np.float64], *, seed: int) -> NDArray[np.int64]:
        """Which problem comes when, i64 [over]; empty without an order.

        Args:
            rates: [M] the share of samples that solve each problem, 1 for the easiest.
        """
        if self.order is ProblemOrder.SHUFFLED:
            return np.zeros(0, np.int64)
        count, over = len(rates), self.over or len(rates)
        shuffled = rng.generator(seed, "curriculum", "ties").permutation(count)
        hardness = rates[shuffled] if self.order is ProblemOrder.HARD_FIRST else -rates[shuffled]
        ranks = np.empty(count)
        ranks[shuffled[np.argsort(hardness, kind="stable")]] = (np.arange(count) + 0.5) / count
        some = rng.generator(seed, "curriculum", "some").permutation(count)[: over % count]
        problems = np.concatenate([np.tile(np.arange(count), over // count), np.sort(some)]).astype(np.int64)
        noise = rng.generator(seed, "curriculum", "band").random(over) - 0.5
        return problems[np.argsort(ranks[problems] + self.band * noise, kind="stable")]
