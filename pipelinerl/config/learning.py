"""Recipe sections for learning and curation, except the objective; `recipe.py` combines all sections."""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from inference_contract.weights import BaseUrl
from pipelinerl.enums import NoSignal, OldLogprobs, Truncated
from pipelinerl.objective.kl_control import KLController
from pipelinerl.objective.reward import NormalizationScope, RewardShaping
from pipelinerl.section import Section


class TrainingSection(Section):
    """The number of rollouts in a step, and how the step learns from them."""

    rollouts_per_step: int = Field(default=256, ge=1)
    """Rollouts that make a step, in whole groups; a knob while the run is live."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Step as soon as this many tokens are ready, even if `rollouts_per_step` is not reached."""
    no_signal: NoSignal | None = None
    """Treatment of groups whose rewards are all equal: `train` keeps them, `filter` replaces them.

    The default depends on the objective's preset: DAPO filters.
    """
    old_logprobs: OldLogprobs = OldLogprobs.RECOMPUTE
    """Source of an objective's `old_logprobs`.

    `recompute` uses the weights at the start of the step, `sampling_weights` those that sampled each token (about k/j
    versions are kept in host memory), and `behavior` takes the sampler's log-probs.
    """
    truncated: Truncated = Truncated.TRAIN
    """Rollouts cut off by the token limit: in the loss (`train`), or only in the group's baseline (`mask`)."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the rollouts of a step (PPO's K); docs/understand/epochs.md."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per pass, on whole groups; a step still produces one model version."""
    target_kl: float | None = Field(default=None, gt=0)
    """KL from π_old, in nats per token, above which a step skips its remaining optimizer steps."""
    deadline_s: float = Field(default=300.0, gt=0)
    """The longest wait for a rollout or for the controller's directive; then the trainer reports it and stops."""

    @model_validator(mode="after")
    def _ends_what_can_end(self) -> Self:
        if self.target_kl is not None and self.epochs * self.mini_batches == 1:
            raise ValueError(
                "training.target_kl skips further optimizer steps of a step, but there is only one; "
                "leave it out, or raise training.epochs or training.mini_batches"
            )
        return self


class RewardSection(Section):
    """Reward shaping of a domain, applied before advantages are computed; see `objective.reward`."""

    overlong_tokens: int = Field(default=0, ge=0)
    """Answers longer than this many tokens lose a reward of 1 (DAPO's soft overlong punishment); 0 disables it."""
    overlong_margin: int = Field(default=0, ge=0)
    """The punishment grows linearly over this many tokens below `overlong_tokens`."""
    mean: NormalizationScope = NormalizationScope.NONE
    """The rollouts whose mean reward is subtracted from each reward; by default nothing is subtracted."""
    std: NormalizationScope = NormalizationScope.NONE
    """The rollouts by whose standard deviation rewards are divided; by default they are not divided."""
    epsilon: float = Field(default=1e-6, ge=0)
    """Added to the standard deviation."""
    low: float = Field(default=-math.inf, allow_inf_nan=True)
    """Lower bound of the result."""
    high: float = Field(default=math.inf, allow_inf_nan=True)
    """Upper bound of the result."""
    scale: float = Field(default=1.0, gt=0)
    """Factor that is applied last."""

    @property
    def shaping(self) -> RewardShaping:
        """The reward shaping as a function of a group's rewards."""
        return RewardShaping(**self.model_dump())

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for sentence in self.shaping.contradictions():
            raise ValueError(f"reward.{sentence}")
        return self


class KLControlSection(Section):
    """Adaptive control of the coefficient of the objective's KL term towards a target KL."""

    target: float = Field(gt=0)
    """Target KL from the reference, in nats per token."""
    gain: float = Field(default=0.1, gt=0, le=1)
    """Speed of the control: the coefficient changes by at most the share 0.2 × `gain` per step."""

    @property
    def controller(self) -> KLController:
        """The rule that updates the KL coefficient after each step."""
        return KLController(**self.model_dump())


class CriticSection(Section):
    """Value model of an objective with values, such as ppo: the policy's architecture with a scalar head."""

    path: str | None = None
    """Directory of a value model or a language model to start from; by default the policy's."""
    learning_rate: float | None = Field(default=None, gt=0)
    """Peak learning rate; by default the policy's."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning-rate schedule over the run's steps, like `optimizer.schedule` for the policy."""
    rate_warmup_steps: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises to its peak."""
    final_fraction: float = Field(default=0.0, ge=0, le=1)
    """The share of the peak rate that remains at the last step; ignored by a constant schedule."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps in which only the critic learns, not the policy; they count as steps of the run."""
    clip: float = Field(default=0.2, gt=0, allow_inf_nan=True)
    """The largest change of a value in one step, in units of reward; `inf` for no limit."""


class ReferenceSection(Section):
    """The frozen policy of a KL term, and the teacher of domains with `loss = "ref_kl"`."""

    path: str | None = None
    """The reference's model directory, or `shipped:<name>`; by default the initial policy."""
    url: BaseUrl | None = None
    """An engine that serves the reference, in place of a model in the trainer; it must report prompt log-probs."""

    @model_validator(mode="after")
    def _in_one_place(self) -> Self:
        if self.path is not None and self.url is not None:
            raise ValueError("reference must name path or url, not both")
        return self

    @property
    def place(self) -> str:
        """The reference's path or URL; empty if the reference is the initial policy."""
        return self.url or self.path or ""


class CooldownSection(Section):
    """Cooldown: skip a problem for a while once a whole group has answered it correctly; by default never skip."""

    epochs: int = Field(default=0, ge=0, le=1000)
    """The number of turns to skip; each problem has one turn per epoch of its data set."""
    steps: int = Field(default=0, ge=0, le=10**6)
    """The number of steps for which a solved problem is skipped, as an alternative to `epochs`."""
    times: int = Field(default=1, ge=1, le=100)
    """The number of groups of a problem that must have only correct answers before the problem is skipped."""

    @property
    def rests(self) -> bool:
        """True if the rule lets problems rest, False if it disables the cooldown."""
        return self.epochs > 0 or self.steps > 0

    @model_validator(mode="after")
    def _one_measure(self) -> Self:
        if self.epochs and self.steps:
            raise ValueError(f"cooldown must name epochs or steps, got {self.epochs} epochs and {self.steps} steps")
        return self


class CurationSection(Section):
    """Curation: replacement of filtered groups, cooldown of solved problems, and a user's own filter of groups."""

    oversample: float | None = Field(default=None, ge=1, le=16)
    """The most orders (requests for a group) issued per order that is expected to train, if groups are filtered.

    1 issues replacements only after groups were filtered. By default 3 if groups are filtered and k > j, otherwise 1:
    in lockstep (k = j), the groups that train would depend on which of the extra orders finish first.
    """
    cooldown: CooldownSection = CooldownSection()
    """Cooldown for domains without their own."""
    filter: str | None = None
    """User function (`path.py:keep`) that decides for each finished group whether it may train."""
    filter_timeout_s: float = Field(default=10.0, gt=0, le=3600)
    """Time limit of the filter for one group."""
