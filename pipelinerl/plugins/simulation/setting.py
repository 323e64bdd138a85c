"""`SimulatedSetting`: the settings of a recipe that determine a run's schedule; and distributions of answer lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from inference_contract.weights import OnUpdate
from pipelinerl import rng
from pipelinerl.staleness import StalenessBounds


@dataclass(frozen=True, slots=True, kw_only=True)
class Shift:
    """A change at step `step`: factors for answers' lengths and the trainer's times, and the share of lost engines."""

    step: int
    lengths: float = 1.0
    trainer: float = 1.0
    lost_engines: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetting:
    """A run to be simulated.

    As in a run, `bounds`, `on_update`, `epochs`, `mini_batches` and `rollouts_per_step` determine the type of schedule,
    from several optimizer steps per batch, as in conventional RL, to in-flight weight updates.

    Attributes:
        auto_j: whether the run chooses j; otherwise it is that of `bounds`.
        steps_ahead: the number of steps whose rollouts are in flight; None: the run chooses it (`LagRule`).
        lag_cost: c, which lag costs (`LagRule`); None: the objective does not correct for lag.
        misjudged: the cost of lag as the run estimates it ÷ its true cost.
        oversample: limit on the number of groups ordered for each group needed, to make up for filtered ones.
        filtered: share of the groups that are filtered out and therefore not trained on.
        shift: a change of lengths, trainer or engines in the middle of the run.
    """

    steps: int
    engines: int
    slots: int
    bounds: StalenessBounds
    on_update: OnUpdate
    rollouts_per_step: int
    group_size: int
    lengths: LengthLaw
    prompt_tokens: int = 0
    epochs: int = 1
    mini_batches: int = 1
    actors: int = 1
    groups_in_flight: int = 64
    attempts: int = 4
    max_groups: int = 4096
    oversample: float = 1.0
    filtered: float = 0.0
    seed: int = 0
    auto_j: bool = False
    steps_ahead: float | None = None
    lag_cost: float | None = None
    misjudged: float = 1.0
    shift: Shift | None = None

    @property
    def sampled_at_once(self) -> int:
        """The number of rollouts that the actors work on at once."""
        return self.actors * self.groups_in_flight * self.group_size

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps in one step of the run."""
        return self.epochs * self.mini_batches


_DRAWN_AT_ONCE: Final = 4096


class LengthLaw(Protocol):
    """A distribution of answer lengths in tokens, each at least 1."""

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw lengths [count]."""
        ...


@dataclass(frozen=True, slots=True)
class FixedLengths:
    """Every answer has the same length, `tokens`."""

    tokens: int

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return equal lengths [count]."""
        return np.full(count, self.tokens, np.int64)


@dataclass(frozen=True, slots=True)
class HeavyTailedLengths:
    """Log-normal lengths, truncated at `most`; `sigma` is the standard deviation of their logarithm."""

    median: float
    sigma: float
    most: int

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw lengths [count], rounded up."""
        with np.errstate(over="ignore"):  # the next line clips an overflow to infinity
            exact = np.ceil(self.median * np.exp(self.sigma * generator.standard_normal(count)))
        return np.clip(exact, 1, self.most).astype(np.int64)


@dataclass(frozen=True, slots=True)
class ObservedLengths:
    """Answer lengths of a run, resampled with replacement."""

    tokens: tuple[int, ...]

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Draw lengths [count]."""
        return generator.choice(np.array(self.tokens, np.int64), count)


def drawing(law: LengthLaw, seed: int) -> Callable[[int], list[int]]:
    """Return a function that draws the next `count` lengths; the whole sequence depends only on `seed`."""
    generator = rng.generator(seed, "simulation", "lengths")
    stock: list[int] = []

    def take(count: int) -> list[int]:
        while len(stock) < count:
            stock.extend(law.draw(generator, _DRAWN_AT_ONCE).tolist())
        taken = stock[-count:]
        del stock[-count:]
        return taken

    return take
