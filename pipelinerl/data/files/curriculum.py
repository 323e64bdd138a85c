"""`Curriculum`: orders training problems by difficulty, as given by the pass rates in a data set's rows.

A band moves over the problems, ranked from easy to hard; the next problem is one of those within the band:

    easy ┊······[=== band ===]··············┊ hard        progress through `over` ─▶

A problem's position is its rank plus noise as wide as the band. A band of width 0 gives the strict order of difficulty,
and a very wide band shuffles. Each problem comes once per epoch, whatever the width. After the first `over` problems,
epochs are shuffled as without a curriculum. The order depends only on the seed and the data, so a resumed run continues
where it stopped.

RLAX §6.2 names this curriculum along with pre-filtering; `pipelinerl prefilter` writes the pass rates.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from pipelinerl import rng
from pipelinerl.errors import RecipeError

#: Field to which `pipelinerl prefilter` writes the pass rate.
PASS_RATE: Final = "metadata.pass_rate"
#: Recipe parameters that set a curriculum.
ORDER: Final = ("order", "order_band", "order_over")
#: Default width of the band, as a share of the ranks.
_BAND: Final = 0.2
_MOST: Final = 10**8


class ProblemOrder(StrEnum):
    """Order in which training problems come."""

    SHUFFLED = "shuffled"
    EASY_FIRST = "easy_first"
    HARD_FIRST = "hard_first"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curriculum:
    """Order of the training problems.

    Attributes:
        band: width of the band, as a share of the problems.
        over: number of problems during which the band moves from one end to the other; None for all of them.
    """

    order: ProblemOrder = ProblemOrder.SHUFFLED
    band: float = _BAND
    over: int | None = None

    @classmethod
    def taken_from(cls, parameters: dict[str, Any], *, where: str) -> Self:
        """Parse the recipe's settings and remove them from `parameters`. Raises `RecipeError` for invalid values."""
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
        """Return problem numbers in the order of the sweep, i64 [over]; empty without an order.

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
