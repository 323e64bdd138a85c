"""`Critic`: a second worker that learns to predict returns, beside the policy and one step at a time with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from pipelinerl.objective.value_loss import ValueLoss, value_statistics
from pipelinerl.training.step.schedule import CONSTANT, LearningRateSchedule
from trainer_contract.trainer import Trainer
from trainer_contract.types import LossStats, MicroBatch


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The worker, what it minimises, and when the policy waits for it.

    Its rate is the peak times `schedule`, of its own steps: one for each step of the run, those of its warm-up too.

    While `warms_up`, the policy stands still: it makes a step without a token, whose weights are bit-equal and whose
    version rises. A version per step keeps what hangs on it (orders paced by staleness, one checkpoint and one report
    per step, exactly-once) free of a second kind of step; the price is a publication of weights that did not change,
    and rollouts that look a little staler than they are.
    """

    worker: Trainer
    loss: ValueLoss
    learning_rate: float
    schedule: LearningRateSchedule = CONSTANT
    warmup_steps: int = 0

    def warms_up(self, version: int) -> bool:
        """Does the policy stand still in the step that follows `version`?"""
        return version < self.warmup_steps

    def weighed(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with every trained token of the step weighing alike, whatever the policy's aggregation."""
        total = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        return [
            replace(batch, weights=(batch.loss_mask / np.float32(max(total, 1))).astype(np.float32))
            for batch in micro_batches
        ]

    def apply(self, micro_batches: Sequence[MicroBatch], losses: Sequence[LossStats]) -> dict[str, float]:
        """The critic's optimizer step; returns its metrics."""
        rate = self.learning_rate * self.schedule.factor(self.worker.model_version)
        step = self.worker.optimizer_step(learning_rate=rate)
        return {
            **value_statistics(micro_batches, [loss.predictions for loss in losses]),
            "value_loss": sum(loss.loss for loss in losses),
            "value_grad_norm": step.grad_norm,
            "value_learning_rate": step.learning_rate,
        }
