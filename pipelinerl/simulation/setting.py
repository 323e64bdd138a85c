"""`SimulatedSetting`: the settings of a recipe that determine a run's schedule, under the recipe's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from inference_contract.weights import OnUpdate
from pipelinerl.simulation.lengths import LengthLaw
from pipelinerl.staleness import StalenessBounds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedSetting:
    """A run to be simulated.

    There is no field for a type of schedule. As in a run, `bounds`, `on_update`, `epochs`, `mini_batches` and
    `rollouts_per_step` determine it: conventional RL with G optimizer steps, one step off, drain, RLAX's (j, k), or
    in-flight updates.

    Attributes:
        oversample: most prompt orders issued for each order that is expected to train.
        filtered: share of groups that are filtered and train nothing.
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

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps in one step of the run."""
        return self.epochs * self.mini_batches
