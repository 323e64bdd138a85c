"""What a run fixes for good; what may change while it is live is in `Knobs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pipelinerl.controller.state.cooldown import CooldownRule
from pipelinerl.controller.state.elastic import ElasticRule
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.enums import NoSignal, Overdue, StalenessScope
from pipelinerl.types import DomainSampling, Sampling

#: So many orders at most are issued for each that is expected to train, where a recipe leaves it open.
OVERSAMPLED: Final = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """The controller's part of a recipe."""

    seed: int
    steps: int
    until_accuracy: float | None
    max_groups: int
    sampling: Sampling
    by_domain: Mapping[str, DomainSampling] = field(default_factory=dict)
    """What domains have their own way."""
    evaluation: EvaluationPlan
    stall_s: float = 120.0
    """The watchdog speaks when nothing has got on for so long."""
    engine_timeout_s: float = 300.0
    """The run ends when no engine has been alive for so long."""
    no_signal: NoSignal = NoSignal.FILTER
    """What becomes of groups whose rewards are all equal."""
    no_signal_steps: int = 20
    """Steps' worth of groups without signal, in a row, after which the run ends where they are dropped."""
    save_s: float = 30.0
    """A run that cannot go on, or is suspended, waits so long for its trainer's state to be saved."""
    scope: StalenessScope = StalenessScope.GROUP
    """What is refused when a token of it is too old; groups of which some rollouts may train are not given up."""
    overdue: Overdue = Overdue.DROP
    """What becomes of groups that are still being sampled when their last step comes."""
    oversample: float | None = 1.0
    """Most orders issued for each that is expected to train; None: as `OVERSAMPLED` says, while k > j."""
    cooldown: Mapping[str, CooldownRule] = field(default_factory=dict)
    """For how long solved problems rest, by domain."""
    elastic: ElasticRule | None = None
    """When engines come and go by the run's own figures; None: when somebody says so."""
    checkpoint_interval_steps: int
    engines_expected: int
