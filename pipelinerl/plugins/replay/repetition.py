"""Replay of a run's steps from a checkpoint and the recorded groups, without engine, stream or controller.

A step is a function of recorded data (weights, groups, learning rates, objective), and trainers on a CPU are
deterministic. A replayed step must therefore reproduce the recorded metrics to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from pipelinerl.enums import StalenessScope
from pipelinerl.errors import DivergedError, RecordError
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.batch import build
from pipelinerl.training.finite_check import NonFiniteStep
from pipelinerl.training.rollouts.admission import Lineage, fresh_part
from pipelinerl.training.schedule import AdaptiveObjective
from pipelinerl.training.step import Step
from pipelinerl.types import RolloutGroup

#: Metrics that a replay must reproduce. Together they depend on every weight, token and log-prob of a step.
COMPARED: Final = ("loss", "grad_norm", "reward", "tokens", "entropy", "ratio_max", "optimizer_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """A step as its run reported it: version, the trainer's lineage, its groups' indices (`orders`), and metrics."""

    version: int
    lineage: Lineage
    orders: Sequence[int]
    figures: Mapping[str, float]
    updates: Sequence[Mapping[str, float]] = ()
    """Figures of each optimizer step, if the step has several."""

    @property
    def learning_rates(self) -> list[float]:
        """The learning rate of each optimizer step within this training step."""
        return [update["learning_rate"] for update in self.updates] or [self.figures["learning_rate"]]

    def part_of(self, group: RolloutGroup) -> RolloutGroup:
        """Return the part of a group that trained, without rollouts that were too old (`staleness.scope`)."""
        if "oldest_fresh" not in self.figures:
            return group
        bounds = StalenessBounds(1, self.version - self.figures["oldest_fresh"])
        part = fresh_part(group, producing=self.version, bounds=bounds, scope=StalenessScope.ROLLOUT)
        return part or group


def trained_groups(recorded: RecordedStep, groups: Mapping[int, Sequence[RolloutGroup]]) -> list[RolloutGroup]:
    """Return a step's groups. Of several copies of a group, the step trained on the first one that fits its lineage.

    Other copies were sampled by weights that a restart discarded. Raises RecordError if a group is missing.
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
    """A replayed step: the recorded step, and the metrics of the replay."""

    recorded: RecordedStep
    figures: Mapping[str, float]

    @property
    def differences(self) -> dict[str, tuple[float, float]]:
        """The values (recorded, replayed) of each compared metric that differs in any bit."""
        pairs = {
            name: (self.recorded.figures[name], self.figures.get(name, float("nan")))
            for name in COMPARED
            if name in self.recorded.figures
        }
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A replay and its settings; `groups` maps a group's index to its recorded copies, in order of arrival."""

    step: Step
    objective: AdaptiveObjective
    groups: Mapping[int, Sequence[RolloutGroup]]
    began_at: int = 0
    """The trainer's version before the first step."""
    acceptance: float = math.inf
    """The greatest staleness among the steps; it decides how many versions' weights are kept for `old_logprobs`."""

    def run(self, steps: Sequence[RecordedStep]) -> Iterator[ReplayedStep]:
        """Repeat recorded steps, which must be consecutive; the first one makes version `began_at` + 1.

        Raises RecordError if a step or one of its groups is missing, DivergedError if a step is not finite.
        """
        held = self.began_at
        for recorded in steps:
            if recorded.version != held + 1:
                raise RecordError(f"the step after version {held} is not recorded, the next is {recorded.version}")
            held = recorded.version
            figures = self._take(recorded, self.objective.current)
            yield ReplayedStep(recorded=recorded, figures=figures | self.objective.observe(figures))

    def instead(self, recorded: RecordedStep, objective: PolicyObjective) -> ReplayedStep:
        """Repeat the next step, `recorded`, but with another objective. Raises the errors of `run`."""
        return ReplayedStep(recorded=recorded, figures=self._take(recorded, objective))

    def _take(self, recorded: RecordedStep, objective: PolicyObjective) -> dict[str, float]:
        self.step.will_sample(recorded.version - 1, acceptance=self.acceptance)
        batch = build(
            trained_groups(recorded, self.groups),
            self.step.rules,
            objective=objective,
            producing=recorded.version,
            baselines=self.objective.baselines,
        )
        try:
            figures = self.step.apply(self.step.accumulate(batch), learning_rates=recorded.learning_rates).figures
        except NonFiniteStep as error:
            raise DivergedError(f"step {recorded.version}: {error} is not finite") from error
        self.objective.trained(batch.scored)
        return figures
