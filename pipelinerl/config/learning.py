"""Sections of a recipe that say what a run learns from, beside the objective; `config` puts the whole together."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from pipelinerl.config.sections import Section
from pipelinerl.enums import NoSignal, OldLogprobs, Truncated
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.reward import NormalizationScope, RewardShaping


class TrainingSection(Section):
    """How many rollouts or tokens make a step, and which of them it learns from."""

    rollouts_per_step: int = Field(default=256, ge=1)
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Step as soon as this many tokens are ready, even if `rollouts_per_step` is not reached."""
    no_signal: NoSignal | None = None
    """Groups whose rewards are all equal: part of their step (`train`), or replaced by others (`filter`). Left out, it
    is what the objective's preset does: DAPO filters."""
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE
    """Where an objective's `old_logprobs` come from: a pass at the weights that sampled each token (`sampling_weights`,
    which keeps about k/j versions in host memory), one at those that the step starts from (`recompute`), or the sampler
    (`behavior`)."""
    truncated: Truncated = Truncated.TRAIN
    """Rollouts that ended for want of tokens: in the loss (`train`), or in their group's baseline alone (`mask`)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts of a step (PPO's K); docs/epochs.md."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in each pass, on whole groups; what a step makes of the weights is one version all the same."""
    target_kl: float | None = Field(default=None, gt=0)
    """A step of several optimizer steps ends before one at which the KL from π_old, in nats per token, exceeds this."""
    deadline_s: float = Field(default=300.0, gt=0)
    """How long a step may wait without a rollout, or a word of the controller, before the run says so and stops."""

    @model_validator(mode="after")
    def _ends_what_can_end(self) -> Self:
        if self.target_kl is not None and self.epochs * self.mini_batches == 1:
            raise ValueError(
                "training.target_kl ends a step before one of its further optimizer steps, and there is only one; "
                "leave it out, or raise training.epochs or training.mini_batches"
            )
        return self


class RewardSection(Section):
    """What a domain makes of its verifier's rewards before advantages are taken; see `objective.reward`."""

    overlong_tokens: int = Field(default=0, ge=0)
    overlong_margin: int = Field(default=0, ge=0)
    mean: NormalizationScope = NormalizationScope.NONE
    std: NormalizationScope = NormalizationScope.NONE
    epsilon: float = Field(default=1e-6, ge=0)
    low: float = Field(default=-math.inf, allow_inf_nan=True)
    high: float = Field(default=math.inf, allow_inf_nan=True)
    scale: float = Field(default=1.0, gt=0)

    @property
    def shaping(self) -> RewardShaping:
        """The function that shapes the rewards of a group."""
        return RewardShaping(**self.model_dump())

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for sentence in self.shaping.contradictions():
            raise ValueError(f"reward.{sentence}")
        return self


class KLControlSection(Section):
    """Steers the coefficient of the objective's KL term, which it begins with, towards a wanted KL."""

    target: float = Field(gt=0)
    """KL from the reference in nats per token."""
    gain: float = Field(default=0.1, gt=0, le=1)

    @property
    def controller(self) -> KLController:
        """The rule that moves the coefficient after each step."""
        return KLController(target=self.target, gain=self.gain)


class CriticSection(Section):
    """The value model of an objective with values, such as ppo: the policy's architecture with a scalar head."""

    path: str | None = None
    """Directory of a value model or a language model to start from; by default the policy's."""
    learning_rate: float | None = Field(default=None, gt=0)
    """At its peak; by default the policy's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate changes over the run's steps, as `optimizer.schedule` says it of the policy's."""
    rate_warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the rate rises to its peak."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """The share of the peak that is left at the last step; a constant rate ignores it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Steps in which the critic learns and the policy stands still; they count as steps of the run."""
    clip: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    """How far a value may move in one step, in units of reward; `inf` for any distance."""


class ReferenceSection(Section):
    """The frozen policy that a KL term measures the distance to."""

    path: str | None = None
    """Its model directory, or `shipped:<name>`; by default the policy's before its first step."""
