"""`TrainStep`: one optimizer step on one trainer, from micro-batches to figures.

It blocks: the loop calls it on the trainer's thread, `accumulate` before the publication under way has ended and
`apply` after it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.statistics import statistics, trained_tokens
from trainer_contract.trainer import Trainer
from trainer_contract.types import LossStats, MicroBatch


@dataclass(frozen=True, slots=True)
class Accumulated:
    """The gradient is in the trainer: what was trained on, with every column the objective needs, and the losses."""

    micro_batches: list[MicroBatch]
    losses: list[LossStats]


@final
@dataclass(frozen=True, slots=True)
class TrainStep:
    """The verbs of one step."""

    trainer: Trainer
    objective: PolicyObjective

    def accumulate(self, micro_batches: list[MicroBatch]) -> Accumulated:
        """Forward passes for the columns that the objective needs, then backward, for each micro-batch."""
        completed = [self._complete(micro_batch) for micro_batch in micro_batches]
        return Accumulated(completed, [self.trainer.backward(batch, self.objective) for batch in completed])

    def apply(self, accumulated: Accumulated, *, learning_rate: float) -> dict[str, float]:
        """The optimizer step; returns its metrics."""
        step = self.trainer.optimizer_step(learning_rate=learning_rate)
        losses = accumulated.losses
        tokens = trained_tokens(accumulated.micro_batches, [loss.logprobs for loss in losses])
        return {
            **statistics(self.objective, tokens),
            "loss": sum(loss.loss for loss in losses),
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "micro_batches": float(len(losses)),
        }

    def _complete(self, micro_batch: MicroBatch) -> MicroBatch:
        if "old_logprobs" in self.objective.needs:
            return replace(micro_batch, old_logprobs=self.trainer.forward(micro_batch))
        return micro_batch
