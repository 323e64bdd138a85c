"""`Critic`: a second worker that learns to predict returns, beside the policy and one step at a time with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import final

import numpy as np

from pipelinerl.objective.value_loss import ValueLoss
from pipelinerl.training.step.schedule import CONSTANT, LearningRateSchedule
from trainer_contract.trainer import Trainer
from trainer_contract.types import MicroBatch, StepStats


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """The worker, what it minimises, and when the policy waits for it.

    Its rate is the peak times `schedule`, of the run's optimizer steps, those of its warm-up too.

    While `warms_up`, the policy stands still: its optimizer steps are without a token, its weights bit-equal, and its
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
            replace(
                batch,
                weights=(batch.loss_mask / np.float32(max(total, 1))).astype(np.float32),
                routed_experts=None,  # the policy's
            )
            for batch in micro_batches
        ]

    def apply(self, step: int) -> StepStats:
        """The critic's optimizer step, the run's `step`th, from 0."""
        return self.worker.optimizer_step(learning_rate=self.learning_rate * self.schedule.factor(step))
