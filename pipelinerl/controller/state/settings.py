"""Settings that are fixed for the whole run; those that may change while it is live are in `Knobs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pipelinerl.controller.state.cooldown import CooldownRule
from pipelinerl.controller.state.elastic import ElasticRule
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.enums import NoSignal, Overdue, StalenessScope
from pipelinerl.types import DomainSampling, Sampling

#: The default limit on the number of orders issued for each order that is expected to train.
OVERSAMPLED: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The settings of a recipe that the controller uses."""

    seed: int
    steps: int
    until_accuracy: float | None
    max_groups: int
    sampling: Sampling
    by_domain: Mapping[str, DomainSampling] = field(default_factory=dict)
    """Sampling parameters that differ by domain."""
    evaluation: EvaluationPlan
    stall_s: float = 120.0
    """Seconds without progress after which the watchdog reports a stall."""
    engine_timeout_s: float = 300.0
    """Seconds without a live engine after which the run ends."""
    no_signal: NoSignal = NoSignal.FILTER
    """The treatment of groups whose rewards are all equal."""
    no_signal_steps: int = 20
    """Consecutive steps' worth of groups without signal after which the run ends, if such groups are dropped."""
    save_s: float = 30.0
    """Seconds to wait for the trainer's state to be saved when a run fails or is suspended."""
    scope: StalenessScope = StalenessScope.GROUP
    """Dropped if a token is too old: the group or the rollout. Actors abandon only whole groups early."""
    overdue: Overdue = Overdue.DROP
    """The treatment of groups that are still being sampled at their last admissible step."""
    oversample: float | None = 1.0
    """The most orders issued per order that is expected to train; None: `OVERSAMPLED` while k > j, otherwise 1."""
    cooldown: Mapping[str, CooldownRule] = field(default_factory=dict)
    """The rule for how long solved problems rest, by domain."""
    elastic: ElasticRule | None = None
    """The rule for scaling the number of engines automatically; None: only operators change it."""
    checkpoint_interval_steps: int
    engines_expected: int
