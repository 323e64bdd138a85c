"""`TrainStep`: one optimizer step of the policy, and of its critic if it has one, from a batch to figures.

    forward passes ─▶ advantages on the whole batch ─▶ backward of policy and critic ─▶ both optimizer steps

It blocks: the loop calls it on the trainer's thread, `accumulate` before the publication under way has ended and
`apply` after it. What is not finite raises `NonFiniteStep`: no weight of the policy has changed then, and no gradient
is left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NoReturn, final

import numpy as np

from pipelinerl.numerics import causes
from pipelinerl.objective.kl_control import as_column
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.statistics import cuts, statistics, trained_tokens
from pipelinerl.training.rollouts.batch import TrainBatch
from pipelinerl.training.rollouts.packing import with_columns
from pipelinerl.training.step import finite_check
from pipelinerl.training.step.adaptive import KL_FIGURE
from pipelinerl.training.step.critic import Critic
from pipelinerl.training.step.entropy_meter import EntropyMeter
from pipelinerl.training.step.finite_check import NonFiniteStep
from pipelinerl.training.step.forward_passes import ForwardPasses
from pipelinerl.types import RolloutGroup
from trainer_contract.errors import NonFiniteError
from trainer_contract.trainer import Trainer
from trainer_contract.types import LossStats, MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """The gradients are in the workers: what they were trained on, with every column, and the losses of each."""

    batch: TrainBatch
    objective: PolicyObjective
    micro_batches: list[MicroBatch]
    losses: list[LossStats]
    value_losses: list[LossStats]
    measured: dict[str, float]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """The verbs of one step."""

    passes: ForwardPasses
    critic: Critic | None = None
    entropy: EntropyMeter = field(default_factory=EntropyMeter)

    @property
    def _policy(self) -> Trainer:
        return self.passes.policy

    @property
    def width(self) -> int:
        """Micro-batches that the policy's trainer computes at once."""
        return self._policy.width

    def parts(self) -> dict[str, Callable[[Path], None]]:
        """What a checkpoint holds of the workers as they are now: who writes it, by the name of its directory.

        They may be called on another thread, until `apply`.
        """
        parts: dict[str, Callable[[Path], None]] = {"trainer": self._policy.save_state}
        parts |= {"critic": self.critic.worker.save_state} if self.critic else {}
        return parts | ({"history": self.passes.history.saver()} if self.passes.history else {})

    def will_sample(self, *, acceptance: float) -> None:
        """The policy's weights are about to be published: keep what later steps, with this k, will need of them."""
        if self.passes.history is not None:
            self.passes.history.keep(self._policy, acceptance=acceptance)

    def can_train(self, group: RolloutGroup) -> bool:
        """Is everything there that the passes over this group need?"""
        return self.passes.history is None or self.passes.history.covers(group)

    def accumulate(self, batch: TrainBatch, objective: PolicyObjective) -> Accumulated:
        """Forward passes for the columns that are needed, advantages, then backward for each micro-batch.

        Raises:
            NonFiniteStep: a column, loss or prediction is not finite.
        """
        with self._clean_on_failure():
            completed = self._completed(batch, objective)
            measured = self.entropy.measure(self._policy, batch)
            losses = self._policy_backward(batch, objective, completed)
            value_losses = self._critic_backward(batch, completed)
        return Accumulated(
            batch=batch,
            objective=objective,
            micro_batches=completed,
            losses=losses,
            value_losses=value_losses,
            measured=measured,
        )

    def apply(self, accumulated: Accumulated, *, learning_rate: float) -> dict[str, float]:
        """Both optimizer steps, the critic's first; returns their metrics.

        Raises:
            NonFiniteStep: a gradient is not finite.
        """
        losses, objective, still = accumulated.losses, accumulated.objective, self._stands_still
        with self._clean_on_failure():
            with finite_check.naming("critic's gradient", accumulated.batch.orders):
                values = self.critic.apply(accumulated.micro_batches, accumulated.value_losses) if self.critic else {}
            try:
                step = self._policy.optimizer_step(learning_rate=0.0 if still else learning_rate)
            except NonFiniteError:
                _raise_cause_of_gradient(accumulated)
        batches = [] if still else accumulated.micro_batches
        logprobs = [loss.predictions for loss in losses]
        tokens, sampled = trained_tokens(batches, logprobs), causes.sampled_tokens(batches, logprobs)
        return {
            **statistics(objective, tokens),
            **causes.figures(sampled, held_version=step.model_version - 1, cuts=cuts(objective, tokens)),
            **values,
            **(self.passes.history.figures() if self.passes.history else {}),
            **_kl_reference(accumulated.micro_batches),
            **accumulated.measured,
            "loss": sum(loss.loss for loss in losses),
            "grad_norm": step.grad_norm,
            "learning_rate": step.learning_rate,
            "micro_batches": float(len(accumulated.micro_batches)),
        }

    @property
    def _stands_still(self) -> bool:
        return self.critic is not None and self.critic.warms_up(self._policy.model_version)

    def _completed(self, batch: TrainBatch, objective: PolicyObjective) -> list[MicroBatch]:
        """The micro-batches with every column that policy and critic read."""
        finite_check.check_rewards(batch)
        needs = objective.passes | (self.critic.loss.needs if self.critic else frozenset())
        completed = batch.micro_batches
        for name, call in self.passes.plan(needs).items():
            with finite_check.naming(name, batch.orders):
                columns = call(completed)
            completed = [
                with_columns(micro_batch, {name: column})
                for micro_batch, column in zip(completed, columns, strict=True)
            ]
        finite_check.check_columns(batch, completed)
        if objective.adv.needs:
            completed = batch.with_advantages(objective.adv, completed)
            finite_check.check_columns(batch, completed)
        return completed

    def _policy_backward(
        self, batch: TrainBatch, objective: PolicyObjective, completed: list[MicroBatch]
    ) -> list[LossStats]:
        compiled, beta = as_column(objective)
        if self._stands_still:
            first = completed[0]
            self._policy.backward([replace(first, loss_mask=np.zeros_like(first.loss_mask))], compiled)
            return []
        given = completed
        if beta is not None:
            factors = [np.full(micro_batch.num_tokens, beta, np.float32) for micro_batch in completed]
            given = [with_columns(each, {"kl_coefficients": f}) for each, f in zip(completed, factors, strict=True)]
        try:
            losses = self._policy.backward(given, compiled)
        except NonFiniteError as error:
            self._raise_cause_of_loss(batch, error, completed, objective)
        for number, (micro_batch, loss) in enumerate(zip(completed, losses, strict=True)):
            finite_check.check_predictions(batch, number, micro_batch, loss.predictions, what="logprobs")
        return losses

    def _critic_backward(self, batch: TrainBatch, completed: list[MicroBatch]) -> list[LossStats]:
        if self.critic is None:
            return []
        weighed = self.critic.weighed(completed)
        try:
            losses = self.critic.worker.backward(weighed, self.critic.loss)
        except NonFiniteError as error:
            raise NonFiniteStep("value loss", _orders(batch, error.number)) from error
        for number, (micro_batch, loss) in enumerate(zip(weighed, losses, strict=True)):
            finite_check.check_predictions(batch, number, micro_batch, loss.predictions, what="values")
        return losses

    def _raise_cause_of_loss(
        self, batch: TrainBatch, error: NonFiniteError, completed: list[MicroBatch], objective: PolicyObjective
    ) -> NoReturn:
        """The columns of a micro-batch are finite and its loss is not: name a term of the objective, or the model."""
        everyone = _orders(batch, error.number)
        if error.number is not None:
            micro_batch = completed[error.number]
            with finite_check.naming("logprobs", everyone):
                (logprobs,) = self._policy.forward([micro_batch])
            finite_check.check_terms(batch, error.number, micro_batch, logprobs, objective)
        raise NonFiniteStep("loss", everyone) from error

    @contextmanager
    def _clean_on_failure(self) -> Iterator[None]:
        """Leaves no gradient behind in a step that is skipped."""
        try:
            yield
        except NonFiniteStep:
            self._policy.discard_gradient()
            if self.critic is not None:
                self.critic.worker.discard_gradient()
            raise


def _orders(batch: TrainBatch, number: int | None) -> list[int]:
    """The orders of a micro-batch, or of all where a trainer does not say which it was."""
    return batch.orders if number is None else batch.group_indices(number)


def _raise_cause_of_gradient(accumulated: Accumulated) -> NoReturn:
    batch, losses = accumulated.batch, accumulated.losses  # no losses while the policy stands still
    for number, (micro_batch, loss) in enumerate(zip(accumulated.micro_batches, losses, strict=False)):
        finite_check.check_terms(batch, number, micro_batch, loss.predictions, accumulated.objective)
    raise NonFiniteStep("model's gradient", batch.orders)


def _kl_reference(micro_batches: Sequence[MicroBatch]) -> dict[str, float]:
    """KL(sampler ‖ reference) in nats per sampled token, by K1; {} where there is no reference."""
    differences = [
        (batch.behavior_logprobs - batch.ref_logprobs)[batch.loss_mask]
        for batch in micro_batches
        if batch.ref_logprobs is not None
    ]
    return {KL_FIGURE: float(np.concatenate(differences).mean(dtype=np.float64))} if differences else {}
