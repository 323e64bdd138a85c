"""One training step: from a batch to the next version of the policy (and of its critic, if any) and to metrics.

    forward passes ─▶ advantages on the whole batch ─▶ ( backward of policy and critic ─▶ both optimizer steps )+

The part in parentheses runs once for each mini-batch of each epoch. All calls block. `accumulate` may run while the
weights of the last step are still being published; `apply` runs after that. If a value is NaN or infinite before the
first update, `NonFiniteStep` is raised. After that, the batch ends before the first mini-batch with such a value, or
whose KL from π_old is too large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, NoReturn, final

import numpy as np

from pipelinerl.objective.kl_control import as_column
from pipelinerl.objective.objective import PolicyObjective
from pipelinerl.objective.streams import Loss, only
from pipelinerl.training import finite_check
from pipelinerl.training.finite_check import NonFiniteStep
from pipelinerl.training.forward_passes import EntropyMeter, ForwardPasses, MeasuredEntropy
from pipelinerl.training.rollouts.batch import MiniBatch, TrainBatch
from pipelinerl.training.rollouts.demonstrations import DemonstrationStream
from pipelinerl.training.rollouts.packing import with_columns
from pipelinerl.training.schedule import KL_FIGURE
from pipelinerl.training.update import BatchEnd, Critic, Gradient, Update, figures_of
from pipelinerl.types import RolloutGroup
from trainer_contract.errors import NonFiniteError
from trainer_contract.trainer import Trainer
from trainer_contract.types import LossStats, MicroBatch

log = logging.getLogger("pipelinerl")


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """A batch whose first mini-batch has had its backward pass, but no optimizer step yet.

    `first` are the losses of this mini-batch; `rest` yields the other mini-batches.
    """

    batch: TrainBatch
    objective: PolicyObjective
    first: Gradient
    rest: Iterator[MiniBatch]
    measured: MeasuredEntropy

    @property
    def losses(self) -> list[LossStats | None]:
        """Each micro-batch's loss at the weights from which the step starts; None outside the first mini-batch."""
        known = {id(trained): loss for trained, loss in zip(self.first.trained, self.first.losses, strict=True)}
        return [known.get(id(micro_batch)) for micro_batch in self.batch.micro_batches]


class StepResult(NamedTuple):
    """The metrics of a step (`figures`), and of each of its optimizer steps (`updates`; [] if only one was planned)."""

    figures: dict[str, float]
    updates: list[dict[str, float]]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainStep:
    """Performs training steps on the workers of the policy and, if there is one, of the critic."""

    passes: ForwardPasses
    critic: Critic | None = None
    entropy: EntropyMeter = field(default_factory=EntropyMeter)
    demonstrations: DemonstrationStream | None = None

    @property
    def _policy(self) -> Trainer:
        return self.passes.policy

    @property
    def width(self) -> int:
        """The number of micro-batches that the policy's trainer computes at once."""
        return self._policy.width

    def parts(self) -> dict[str, Callable[[Path], None]]:
        """Return functions that save the states of policy, critic and weight history, by directory name.

        Any thread may call them, but not after the next `apply`, which changes the states.
        """
        parts: dict[str, Callable[[Path], None]] = {"trainer": self._policy.save_state}
        parts |= {"critic": self.critic.worker.save_state} if self.critic else {}
        return parts | ({"history": self.passes.history.saver()} if self.passes.history else {})

    def will_sample(self, version: int, *, acceptance: float) -> None:
        """Copy the weights of `version` before they are published, if forward passes of later steps need the copy.

        `acceptance` is the staleness bound k, which determines how long the copy is kept.
        """
        if self.passes.history is not None:
            self.passes.history.keep(self._policy, version=version, acceptance=acceptance)

    def can_train(self, group: RolloutGroup) -> bool:
        """Return whether this group can train: its sampler's weights must be available if forward passes need them."""
        return self.passes.history is None or self.passes.history.covers(group)

    def accumulate(self, batch: TrainBatch, objective: PolicyObjective) -> Accumulated:
        """Run forward passes and the first mini-batch's backward. Raises NonFiniteStep if any result is not finite."""
        with self._clean_on_failure():
            completed = batch.completed(self._completed(batch, objective))
            measured = self.entropy.measure(self._policy, batch)
            rest = completed.mini_batches()
            first = self._gradient(next(rest), objective)
        return Accumulated(batch=completed, objective=objective, first=first, rest=rest, measured=measured)

    def apply(self, accumulated: Accumulated, *, learning_rates: Sequence[float]) -> StepResult:
        """Take the batch's optimizer steps, up to one per rate.

        Raises NonFiniteStep if the first step is not finite.
        """
        batch, objective = accumulated.batch, accumulated.objective
        mini_batching, end = batch.partition.mini_batching, BatchEnd.WHOLE
        updates = [self._update(accumulated.first, objective, number=0, rate=learning_rates[0])]
        for number, rate in enumerate(learning_rates[1:], start=1):
            if (mini_batch := next(accumulated.rest, None)) is None:
                break
            try:
                gradient = self._gradient(mini_batch, objective)
                if mini_batching.exceeded(gradient.kl_from_old(objective)):
                    self._discard()
                    end = BatchEnd.KL
                    break
                updates.append(self._update(gradient, objective, number=number, rate=rate))
            except NonFiniteStep as error:
                log.error("step %d ends after %d optimizer steps: %s not finite", batch.producing, number, error)
                end = BatchEnd.NOT_FINITE
                break
        figures = {
            **figures_of(updates, objective, held_version=batch.producing - 1),
            **(self.passes.history.figures() if self.passes.history else {}),
            **_kl_reference(batch.micro_batches, reads="ref_logprobs" in objective.passes),
            **accumulated.measured.figures,
        }
        if mini_batching.updates == 1:
            return StepResult(figures, [])
        return StepResult(figures | end.figures(updates), [update.figures(objective) for update in updates])

    def _gradient(self, mini_batch: MiniBatch, objective: PolicyObjective) -> Gradient:
        with self._clean_on_failure():
            batch, demonstrations = mini_batch.batch, self._demonstrated(mini_batch)
            losses = self._policy_backward(batch, demonstrations, objective)
            value_losses = self._critic_backward(batch)
        return Gradient(
            mini_batch=mini_batch,
            losses=losses[: len(losses) - len(demonstrations)],
            value_losses=value_losses,
            cross_entropy=_cross_entropy(demonstrations, losses[len(losses) - len(demonstrations) :]),
        )

    def _demonstrated(self, mini_batch: MiniBatch) -> list[MicroBatch]:
        batch = mini_batch.batch
        if self.demonstrations is None or self._stands_still(batch):
            return []
        number = batch.optimizer_steps.start + mini_batch.epoch * batch.partition.mini_batching.mini_batches
        return self.demonstrations.micro_batches(number + mini_batch.number, width=self.width)

    def _update(self, gradient: Gradient, objective: PolicyObjective, *, number: int, rate: float) -> Update:
        """Take the critic's optimizer step, then the policy's; `number` is the step's number in the batch, from 0."""
        batch, critic = gradient.batch, None
        with self._clean_on_failure():
            if self.critic is not None:
                with finite_check.naming("critic's gradient", batch.orders):
                    critic = self.critic.apply(batch.optimizer_steps[number])
            try:
                policy = self._policy.optimizer_step(learning_rate=0.0 if self._stands_still(batch) else rate)
            except NonFiniteError:
                _raise_cause_of_gradient(gradient, objective)
        return Update(gradient=gradient, policy=policy, critic=critic)

    def _stands_still(self, batch: TrainBatch) -> bool:
        return self.critic is not None and self.critic.warms_up(batch.producing - 1)

    def _completed(self, batch: TrainBatch, objective: PolicyObjective) -> list[MicroBatch]:
        finite_check.check_rewards(batch)
        needs = objective.passes | batch.losses.passes | (self.critic.loss.needs if self.critic else frozenset())
        if batch.partition.mini_batching.target_kl is not None:
            needs |= {"old_logprobs"}
        completed = batch.micro_batches
        for name, call in self.passes.plan(needs, batch, objective=objective).items():
            with finite_check.naming(name, batch.orders):
                columns = call(completed)
            completed = [with_columns(each, {name: column}) for each, column in zip(completed, columns, strict=True)]
        finite_check.check_columns(batch, completed)
        if objective.late_columns:
            completed = batch.with_advantages(objective, completed)
            finite_check.check_columns(batch, completed)
        return completed

    def _policy_backward(
        self, batch: TrainBatch, demonstrations: Sequence[MicroBatch], objective: PolicyObjective
    ) -> list[LossStats]:
        """Run one backward call over rollouts and demonstrations; return the losses of both, in this order.

        During the critic's warm-up, the call has no tokens and the result is [].
        """
        (compiled, beta), completed = as_column(objective), batch.micro_batches
        if self._stands_still(batch):
            first = completed[0]
            self._policy.backward([replace(first, loss_mask=np.zeros_like(first.loss_mask))], compiled)
            return []
        given = completed
        if beta is not None:
            factors = [np.full(micro_batch.num_tokens, beta, np.float32) for micro_batch in completed]
            given = [replace(each, kl_coefficients=f) for each, f in zip(completed, factors, strict=True)]
        streamed = batch.losses.objective(compiled)
        blank = [name for name in streamed.needs if demonstrations and getattr(demonstrations[0], name, 0) is None]
        others = [
            with_columns(each, {name: np.zeros(each.num_tokens, np.float32) for name in blank})
            for each in demonstrations
        ]
        try:
            losses = self._policy.backward([*given, *others], streamed)
        except NonFiniteError as error:
            if error.number is not None and error.number >= len(completed):
                raise NonFiniteStep("loss of demonstrations", batch.orders) from error
            self._raise_cause_of_loss(batch, error, completed, objective)
        for number, (micro_batch, loss) in enumerate(zip(completed, losses, strict=False)):
            finite_check.check_predictions(batch, number, micro_batch, loss.predictions, what="logprobs")
        return losses

    def _critic_backward(self, batch: TrainBatch) -> list[LossStats]:
        if self.critic is None:
            return []
        weighed = self.critic.weighed(batch.micro_batches)
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
        """Raise NonFiniteStep, naming the term of the objective, or the model, as cause of a non-finite loss."""
        everyone = _orders(batch, error.number)
        if error.number is not None:
            micro_batch = completed[error.number]
            with finite_check.naming("logprobs", everyone):
                (logprobs,) = self._policy.forward([micro_batch])
            finite_check.check_terms(batch, error.number, micro_batch, logprobs, objective)
        raise NonFiniteStep("loss", everyone) from error

    @contextmanager
    def _clean_on_failure(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteStep:
            self._discard()
            raise

    def _discard(self) -> None:
        self._policy.discard_gradient()
        if self.critic is not None:
            self.critic.worker.discard_gradient()


def _orders(batch: TrainBatch, number: int | None) -> list[int]:
    return batch.orders if number is None else batch.group_indices(number)


def _raise_cause_of_gradient(gradient: Gradient, objective: PolicyObjective) -> NoReturn:
    batch = gradient.batch  # in the critic's warm-up the policy has no losses to check
    for number, (micro_batch, loss) in enumerate(zip(batch.micro_batches, gradient.losses, strict=False)):
        finite_check.check_terms(batch, number, micro_batch, loss.predictions, objective)
    raise NonFiniteStep("model's gradient", batch.orders)


def _cross_entropy(demonstrations: Sequence[MicroBatch], losses: Sequence[LossStats]) -> float | None:
    tokens = sum(int(batch.loss_mask.sum()) for batch in demonstrations)
    return -sum(float(loss.predictions.sum(dtype=np.float64)) for loss in losses) / tokens if tokens else None


def _kl_reference(micro_batches: Sequence[MicroBatch], *, reads: bool) -> dict[str, float]:
    """Return KL(sampler ‖ reference) and KL(sampler ‖ teacher), K1 estimates in nats per token, where known.

    The former covers tokens with RL loss, and only if the objective reads the reference (`reads`).
    """
    metrics: dict[str, float] = {}
    for name, loss in ((KL_FIGURE, Loss.RL), ("kl_teacher", Loss.REF_KL)):
        differences = [
            (batch.behavior_logprobs - batch.ref_logprobs)[only(batch, loss).loss_mask]
            for batch in micro_batches
            if batch.ref_logprobs is not None and (loss is not Loss.RL or reads)
        ]
        joined = np.concatenate([np.zeros(0, np.float32), *differences])
        metrics |= {name: float(joined.mean(dtype=np.float64))} if joined.size else {}
    return metrics
