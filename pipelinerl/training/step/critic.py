"""A second worker that learns to predict returns, one step at a time with the policy."""

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
    """The worker, its loss, and the warm-up during which the policy waits for it.

    Its rate is the peak times `schedule` of the run's optimizer steps, including those of its warm-up.

    During the warm-up the policy stands still: its optimizer steps have no token, its weights stay equal to the bit,
    and its version rises. One version per step keeps everything that depends on versions simple: pacing by staleness,
    one checkpoint and one report per step, exactly-once. The cost is the publication of unchanged weights, and a
    staleness that looks slightly too high.
    """

    worker: Trainer
    loss: ValueLoss
    learning_rate: float
    schedule: LearningRateSchedule = CONSTANT
    warmup_steps: int = 0

    def warms_up(self, version: int) -> bool:
        """Return whether the policy stands still in the step that follows `version`."""
        return version < self.warmup_steps

    def weighed(self, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """Return the micro-batches with equal weights of all trained tokens, whatever the policy's aggregation."""
        total = sum(int(batch.loss_mask.sum()) for batch in micro_batches)
        return [
            replace(
                batch,
                weights=(batch.loss_mask / np.float32(max(total, 1))).astype(np.float32),
                routed_experts=None,  # they belong to the policy
            )
            for batch in micro_batches
        ]

    def apply(self, step: int) -> StepStats:
        """Make the critic's optimizer step number `step` of the run, from 0."""
        return self.worker.optimizer_step(learning_rate=self.learning_rate * self.schedule.factor(step))
