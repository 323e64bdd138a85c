"""Updates of the policy and its critic: the optimizer steps of a batch, and the metrics of these steps.

Metrics cover every token of every update, so a rollout that trains in two epochs counts twice. Metrics that compare
engine and trainer use only the first update, whose log-probs belong to the weights at the start of the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import fmean
from typing import Final, final

import numpy as np

from pipelinerl.numerics import causes
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.statistics import cuts, statistics, trained_tokens
from pipelinerl.objective.streams import Loss, only
from pipelinerl.objective.tokens import Tokens
from pipelinerl.objective.value_loss import ValueLoss, value_statistics
from pipelinerl.training.rollouts.batch import MiniBatch, TrainBatch
from pipelinerl.training.schedule import CONSTANT, LearningRateSchedule
from trainer_contract.trainer import Trainer
from trainer_contract.types import Float32, LossStats, MicroBatch, StepStats

#: Name of the metric for the KL from π_old, in nats per sampled token, estimated by K3; `training.target_kl` is its
#: limit.
KL_OLD: Final = "kl_old"
#: Names of the token metrics that are reported for each update.
_PER_UPDATE: Final = (KL_OLD, "clip_fraction", "truncated_fraction", "ratio_max", "ess")


class BatchEnd(StrEnum):
    """The reason why the optimizer steps of a batch ended."""

    WHOLE = "whole"
    """All steps were taken."""
    KL = "kl"
    """The next mini-batch's KL from π_old exceeded its bound."""
    NOT_FINITE = "not_finite"
    """The next mini-batch gave a value that is NaN or infinite; the rest of the batch is not trained."""

    def figures(self, updates: Sequence[Update]) -> dict[str, float]:
        """Return a step's metrics: its number of `updates`, and why it ended."""
        return {
            "optimizer_steps": float(len(updates)),
            "ended_by_kl": float(self is BatchEnd.KL),
            "ended_not_finite": float(self is BatchEnd.NOT_FINITE),
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The losses of a mini-batch whose gradient the workers have accumulated.

    `losses` are the policy's, [] while only the critic trains; `value_losses` are the critic's.
    """

    mini_batch: MiniBatch
    losses: list[LossStats]
    value_losses: list[LossStats]
    cross_entropy: float | None = None

    @property
    def batch(self) -> TrainBatch:
        """The packed rollouts of the mini-batch."""
        return self.mini_batch.batch

    @property
    def trained(self) -> list[MicroBatch]:
        """The micro-batches on which the policy was trained; [] while only the critic trains."""
        return self.batch.micro_batches if self.losses else []

    @property
    def logprobs(self) -> list[Float32]:
        """The policy's log-probs of each micro-batch, at the weights before the update."""
        return [loss.predictions for loss in self.losses]

    def kl_from_old(self, objective: PolicyObjective) -> float | None:
        """Return the KL from π_old, estimated by K3, in nats per token; None if the batch has no old log-probs."""
        return statistics(objective, trained_tokens(self.trained, self.logprobs)).get(KL_OLD)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update: the policy's gradient and optimizer step, and the critic's optimizer step, if any."""

    gradient: Gradient
    policy: StepStats
    critic: StepStats | None

    def figures(self, objective: PolicyObjective) -> dict[str, float]:
        """Return the metrics of this update; epochs and mini-batches are counted from 1."""
        gradient, tokens = self.gradient, _tokens([self])
        measured = statistics(gradient.batch.losses.objective(objective), tokens)
        return {
            "epoch": gradient.mini_batch.epoch + 1.0,
            "mini_batch": gradient.mini_batch.number + 1.0,
            "loss": _loss(gradient.losses),
            "grad_norm": self.policy.grad_norm,
            "learning_rate": self.policy.learning_rate,
            "tokens": float(sum(batch.loss_mask.sum() for batch in gradient.trained)),
            **{name: measured[name] for name in _PER_UPDATE if name in measured},
            **({"value_loss": _loss(gradient.value_losses)} if self.critic else {}),
        }


def figures_of(updates: Sequence[Update], objective: PolicyObjective, *, held_version: int) -> dict[str, float]:
    """Return the metrics of a step that began with weights of version `held_version` and made these updates."""
    tokens, first = _tokens(updates), updates[0].gradient
    streamed = first.batch.losses.objective(objective)
    compared = causes.sampled_tokens(first.trained, first.logprobs)
    metrics = {
        **statistics(streamed, tokens),
        **causes.figures(compared, held_version=held_version, cuts=cuts(streamed, _tokens(updates[:1]))),
    }
    if len(updates) > 1 and (sampled := causes.sampled_tokens(_trained(updates), _logprobs(updates))) is not None:
        metrics |= causes.by_age(held_version + 1 - sampled.versions, cuts(streamed, tokens))
    return {
        **metrics,
        **_of_critic(updates),
        **_mean("sent_share", (update.policy.sent_share for update in updates)),
        **_mean("ce_loss", (update.gradient.cross_entropy for update in updates)),
        "loss": fmean(_loss(update.gradient.losses) for update in updates),
        "grad_norm": fmean(update.policy.grad_norm for update in updates),
        "learning_rate": updates[-1].policy.learning_rate,
        "micro_batches": float(sum(len(update.gradient.batch.packed) for update in updates)),
    }


def _mean(name: str, values: Iterable[float | None]) -> dict[str, float]:
    """Return the mean of the known values as the metric `name`; {} if none is known."""
    known = [value for value in values if value is not None]
    return {name: fmean(known)} if known else {}


def _of_critic(updates: Sequence[Update]) -> dict[str, float]:
    made = [update.critic for update in updates if update.critic is not None]
    if not made:
        return {}
    losses = [update.gradient.value_losses for update in updates]
    batches = [only(batch, Loss.RL) for update in updates for batch in update.gradient.batch.micro_batches]
    return {
        **value_statistics(batches, [loss.predictions for each in losses for loss in each]),
        "value_loss": fmean(_loss(each) for each in losses),
        "value_grad_norm": fmean(step.grad_norm for step in made),
        "value_learning_rate": made[-1].learning_rate,
    }


def _tokens(updates: Sequence[Update]) -> Tokens | None:
    return trained_tokens(_trained(updates), _logprobs(updates))


def _trained(updates: Sequence[Update]) -> list[MicroBatch]:
    return [batch for update in updates for batch in update.gradient.trained]


def _logprobs(updates: Sequence[Update]) -> list[Float32]:
    return [logprobs for update in updates for logprobs in update.gradient.logprobs]


def _loss(losses: Sequence[LossStats]) -> float:
    return float(sum(loss.loss for loss in losses))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The critic's worker and loss, and the warm-up before the policy trains.

    The critic's rate is `learning_rate` times the schedule's factor. During the warm-up, the policy takes steps without
    tokens: its weights stay the same but its version increases, so that each step still makes one version.
    """

    worker: Trainer
    loss: ValueLoss
    learning_rate: float
    schedule: LearningRateSchedule = CONSTANT
    warmup_steps: int = 0

    def warms_up(self, version: int) -> bool:
        """Return whether the step that follows `version` trains only the critic."""
        return version < self.warmup_steps

    def weighed(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """For the critic, weight all tokens of loss stream `RL` equally, and mask others; return new micro-batches."""
        rewarded = [only(batch, Loss.RL) for batch in micro_batches]
        total = sum(int(batch.loss_mask.sum()) for batch in rewarded)
        return [
            replace(
                batch,
                weights=(batch.loss_mask / np.float32(max(total, 1))).astype(np.float32),
                routed_experts=None,  # only the policy replays routing
            )
            for batch in rewarded
        ]

    def apply(self, step: int) -> StepStats:
        """Take one optimizer step of the critic; `step` is its number in the run, counted from 0."""
        return self.worker.optimizer_step(learning_rate=self.learning_rate * self.schedule.factor(step))
