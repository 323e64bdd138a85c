"""Replay: the steps of a run again, from a checkpoint and the recorded groups, with no engine, stream or controller.

A step is a function of the weights before it, its groups, its learning rates and the objective. All of them were
recorded, and a trainer repeats equal calls to the bit on a CPU: so a replayed step must give the figures that the run
reported, to the last bit, and one that does not has been computed on something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from pipelinerl.enums import StalenessScope, Truncated
from pipelinerl.errors import DivergedError, RecordError
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.reward import RewardShaping
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.rollouts.admission import Lineage, fresh_part
from pipelinerl.training.rollouts.batch import build
from pipelinerl.training.rollouts.mini_batches import ONE_STEP, MiniBatching
from pipelinerl.training.step.adaptive import AdaptiveObjective
from pipelinerl.training.step.finite_check import NonFiniteStep
from pipelinerl.training.step.train_step import TrainStep
from pipelinerl.types import RolloutGroup

#: Figures that say whether two steps were the same: they depend on every weight, token and log-prob of it.
COMPARED: Final = ("loss", "grad_norm", "reward", "tokens", "entropy", "ratio_max", "optimizer_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as its run reported it: the version it made, of which lineage, the orders of its groups, its figures."""

    version: int
    lineage: Lineage
    orders: Sequence[int]
    figures: Mapping[str, float]
    updates: Sequence[Mapping[str, float]] = ()
    """Figures of each optimizer step, where the step was to have several."""

    @property
    def learning_rates(self) -> list[float]:
        """Of the optimizer steps."""
        return [update["learning_rate"] for update in self.updates] or [self.figures["learning_rate"]]

    def part_of(self, group: RolloutGroup) -> RolloutGroup:
        """What of a group trained the step, where others of its rollouts were too old (`staleness.scope`)."""
        if "oldest_fresh" not in self.figures:
            return group
        bounds = StalenessBounds(1, self.version - self.figures["oldest_fresh"])
        part = fresh_part(group, producing=self.version, bounds=bounds, scope=StalenessScope.ROLLOUT)
        return part or group


def trained_groups(recorded: RecordedStep, groups: Mapping[int, Sequence[RolloutGroup]]) -> list[RolloutGroup]:
    """What a step was made of: of each of its orders the first copy that its trainer could take.

    Args:
        groups: the recorded ones by order, each in the order of their arrival.

    Raises:
        RecordError: one is not there any more.
    """
    chosen = []
    for index in recorded.orders:
        copies = [group for group in groups.get(index, ()) if recorded.lineage.includes(group)]
        if not copies:
            raise RecordError(
                f"the group of order {index}, of step {recorded.version}, is not in the streams any more: rollouts are "
                "kept from the oldest kept checkpoint on; raise checkpoint.keep to go back further"
            )
        chosen.append(recorded.part_of(copies[0]))
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """A step taken again."""

    recorded: RecordedStep
    figures: Mapping[str, float]

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """(recorded, replayed) of every compared figure that is not the same to the bit."""
        pairs = {
            name: (self.recorded.figures[name], self.figures.get(name, float("nan")))
            for name in COMPARED
            if name in self.recorded.figures
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What steps are taken with; `groups` holds the recorded groups by order, each in the order of their arrival."""

    step: TrainStep
    objective: AdaptiveObjective
    groups: Mapping[int, Sequence[RolloutGroup]]
    token_budget: int
    shaping: Mapping[str, RewardShaping]
    truncated: Truncated = Truncated.TRAIN
    mini_batching: MiniBatching = ONE_STEP
    began_at: int = 0
    """The version that the trainer holds before the first step."""
    acceptance: float = math.inf
    """The greatest staleness among the steps; how many weights are kept for `old_logprobs` depends on it."""

    def run(self, steps: Sequence[RecordedStep]) -> Iterator[ReplayedStep]:
        """Take the steps, the first of which must follow on `began_at`, which are the trainer's weights.

        Raises:
            RecordError: a step is missing, or one of its groups.
            DivergedError: a step is not finite.
        """
        held = self.began_at
        for recorded in steps:
            if recorded.version != held + 1:
                raise RecordError(f"the step after version {held} is not recorded, the next is {recorded.version}")
            held = recorded.version
            figures = self._take(recorded, self.objective.current)
            yield ReplayedStep(recorded=recorded, figures=figures | self.objective.observe(figures))

    def instead(self, recorded: RecordedStep, objective: PolicyObjective) -> ReplayedStep:
        """What another objective makes of the step that comes next; the trainer has taken that step afterwards.

        Raises as `run` does.
        """
        return ReplayedStep(recorded=recorded, figures=self._take(recorded, objective))

    def _take(self, recorded: RecordedStep, objective: PolicyObjective) -> dict[str, float]:
        self.step.will_sample(recorded.version - 1, acceptance=self.acceptance)
        batch = build(
            trained_groups(recorded, self.groups),
            objective=objective,
            shaping=self.shaping,
            truncated=self.truncated,
            token_budget=self.token_budget,
            producing=recorded.version,
            width=self.step.width,
            mini_batching=self.mini_batching,
        )
        try:
            accumulated = self.step.accumulate(batch, objective)
            return batch.stats | self.step.apply(accumulated, learning_rates=recorded.learning_rates).figures
        except NonFiniteStep as error:
            raise DivergedError(f"step {recorded.version}: {error} is not finite") from error
