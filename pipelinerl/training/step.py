"""One training step: from a packed batch to the next version of the policy (and of its critic, if any) and to metrics.

    forward passes ─▶ advantages on the whole batch ─▶ ( backward of policy and critic ─▶ both optimizer steps )+

The part in parentheses runs once for each mini-batch of each epoch. All calls block. `accumulate` may run while the
weights of the last step are still being published; `apply` runs after that. If a value is NaN or infinite before the
first update, `NonFiniteStep` is raised. After that, the batch ends before the first mini-batch with such a value, or
whose KL from π_old is too large.

Metrics cover every token of every update, so a rollout that trains in two epochs counts twice. Metrics that compare
engine and trainer use only the first update, whose log-probs belong to the weights at the start of the step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

import numpy as np

from pipelinerl.numerics import causes
from pipelinerl.objective.kl_control import as_column
from pipelinerl.objective.statistics import cuts, statistics, trained_tokens
from pipelinerl.objective.streams import Loss, only
from pipelinerl.objective.tokens import Tokens
from pipelinerl.objective.value_loss import ValueLoss, value_statistics
from pipelinerl.training.batch import BatchRules, NonFiniteStep, TrainBatch, naming
from pipelinerl.training.demonstrations import DemonstrationStream
from pipelinerl.training.passes import EntropyMeter, ForwardPasses, MeasuredEntropy
from pipelinerl.training.schedule import CONSTANT, KL_FIGURE, LearningRateSchedule
from pipelinerl.types import RolloutGroup
from trainer_contract.errors import NonFiniteError
from trainer_contract.trainer import Trainer
from trainer_contract.types import Float32, LossStats, MicroBatch, StepStats

log = logging.getLogger("pipelinerl")

#: Name of the metric for the KL from π_old, in nats per sampled token, estimated by K3; `training.target_kl` is its
#: limit.
KL_OLD: Final = "kl_old"
#: Names of the token metrics that are reported for each update.
_PER_UPDATE: Final = (KL_OLD, "clip_fraction", "truncated_fraction", "ratio_max", "ess")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradient:
    """The losses of a mini-batch whose gradient the workers have accumulated.

    `losses` are the policy's, [] while only the critic trains; `value_losses` are the critic's. `trained` are the
    micro-batches of the policy, with its `logprobs` at the weights before the update.
    """

    batch: TrainBatch
    losses: list[LossStats]
    value_losses: list[LossStats]
    cross_entropy: float | None

    @property
    def trained(self) -> list[MicroBatch]:
        return self.batch.micro_batches if self.losses else []

    @property
    def logprobs(self) -> list[Float32]:
        return [loss.predictions for loss in self.losses]


@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulated:
    """A batch whose `first` mini-batch has had its backward pass, but no optimizer step; `rest` yields the others."""

    batch: TrainBatch
    first: Gradient
    rest: Iterator[TrainBatch]
    measured: MeasuredEntropy

    @property
    def logprobs(self) -> list[Float32 | None]:
        """Each micro-batch's log-probs at the weights from which the step starts; None outside the first mini-batch."""
        known = {id(each): logprobs for each, logprobs in zip(self.first.trained, self.first.logprobs, strict=True)}
        return [known.get(id(micro_batch)) for micro_batch in self.batch.micro_batches]


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """One update: the gradient, and the optimizer steps of the policy and of the critic, if any."""

    gradient: Gradient
    policy: StepStats
    critic: StepStats | None


class StepResult(NamedTuple):
    """The metrics of a step (`figures`), and of each of its optimizer steps (`updates`; [] if only one was planned)."""

    figures: dict[str, float]
    updates: list[dict[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Performs training steps on the workers of the policy and, if there is one, of the critic."""

    rules: BatchRules
    passes: ForwardPasses
    critic: Critic | None = None
    entropy: EntropyMeter = field(default_factory=EntropyMeter)
    demonstrations: DemonstrationStream | None = None

    @property
    def policy(self) -> Trainer:
        return self.passes.policy

    def parts(self) -> dict[str, Callable[[Path], None]]:
        """Return, by directory, functions that save policy, critic and history; valid until `apply`."""
        parts: dict[str, Callable[[Path], None]] = {"trainer": self.policy.save_state}
        parts |= {"critic": self.critic.worker.save_state} if self.critic else {}
        return parts | ({"history": self.passes.history.saver()} if self.passes.history else {})

    def will_sample(self, version: int, *, acceptance: float) -> None:
        """Keep the weights of `version`, before it is published, if steps within k need them (`acceptance`)."""
        if self.passes.history is not None:
            self.passes.history.keep(self.policy, version=version, acceptance=acceptance)

    def can_train(self, group: RolloutGroup) -> bool:
        return self.passes.history is None or self.passes.history.covers(group)

    # --- before the weights change ---------------------------------------------------------------------------------

    def accumulate(self, batch: TrainBatch) -> Accumulated:
        """Run forward passes and the first mini-batch's backward. Raises NonFiniteStep if any result is not finite."""
        needs = batch.objective.passes | batch.rules.losses.passes | (self.critic.loss.needs if self.critic else set())
        if batch.rules.mini_batching.target_kl is not None:
            needs |= {"old_logprobs"}
        with self._clean_on_failure():
            batch = self.passes.completed(batch, needs)
            batch.check_columns()
            if batch.objective.late_columns:
                batch = batch.with_advantages()
                batch.check_columns()
            measured = self.entropy.measure(self.policy, batch)
            rest = batch.mini_batches()
            first = self._gradient(next(rest))
        return Accumulated(batch=batch, first=first, rest=rest, measured=measured)

    def _gradient(self, batch: TrainBatch) -> Gradient:
        demonstrations, cross_entropy = list[MicroBatch](), None
        if self.demonstrations is not None and not self._stands_still(batch):
            number = batch.optimizer_steps[batch.number]
            demonstrations = self.demonstrations.micro_batches(number, batch.rules)
        with self._clean_on_failure():
            losses, value_losses = self._policy_backward(batch, demonstrations), list[LossStats]()
            if self.critic is not None:
                try:
                    weighed = weighed_for_critic(batch.micro_batches)
                    value_losses = self.critic.worker.backward(weighed, self.critic.loss)
                except NonFiniteError as error:
                    groups = batch.orders if error.number is None else batch.group_indices(error.number)
                    raise NonFiniteStep("value loss", groups) from error
                batch.check_finite([loss.predictions for loss in value_losses], what="values")
        losses, imitated = losses[: len(losses) - len(demonstrations)], losses[len(losses) - len(demonstrations) :]
        if tokens := sum(int(each.loss_mask.sum()) for each in demonstrations):
            cross_entropy = -sum(float(loss.predictions.sum(dtype=np.float64)) for loss in imitated) / tokens
        return Gradient(batch=batch, losses=losses, value_losses=value_losses, cross_entropy=cross_entropy)

    def _stands_still(self, batch: TrainBatch) -> bool:
        """Return whether the policy does not train, in the critic's warm-up."""
        return self.critic is not None and batch.producing <= self.critic.warmup_steps

    def _policy_backward(self, batch: TrainBatch, demonstrations: Sequence[MicroBatch]) -> list[LossStats]:
        """Return the losses of rollouts and demonstrations, in this order; [] during the critic's warm-up."""
        (compiled, beta), given = as_column(batch.objective), batch.micro_batches
        if self._stands_still(batch):
            first = given[0]
            self.policy.backward([replace(first, loss_mask=np.zeros_like(first.loss_mask))], compiled)
            return []
        if beta is not None:
            given = [replace(each, kl_coefficients=np.full(each.num_tokens, beta, np.float32)) for each in given]
        streamed = batch.rules.losses.objective(compiled)
        blank = [name for name in streamed.needs if demonstrations and getattr(demonstrations[0], name, 0) is None]
        others = []
        for each in demonstrations:
            zeros: dict[str, Any] = {name: np.zeros(each.num_tokens, np.float32) for name in blank}
            others.append(replace(each, **zeros))
        try:
            losses = self.policy.backward([*given, *others], streamed)
        except NonFiniteError as error:
            if error.number is None:
                raise NonFiniteStep("loss", batch.orders) from error
            if error.number >= len(given):
                raise NonFiniteStep("loss of demonstrations", batch.orders) from error
            groups = batch.group_indices(error.number)
            with naming("logprobs", groups):
                (logprobs,) = self.policy.forward([batch.micro_batches[error.number]])
            batch.check_terms(error.number, logprobs)
            raise NonFiniteStep("loss", groups) from error
        # A prediction may be infinite although the loss is finite.
        batch.check_finite([loss.predictions for loss in losses[: len(given)]], what="logprobs")
        return losses

    @contextmanager
    def _clean_on_failure(self) -> Iterator[None]:
        try:
            yield
        except NonFiniteStep:
            self.discard()
            raise

    def discard(self) -> None:
        self.policy.discard_gradient()
        if self.critic is not None:
            self.critic.worker.discard_gradient()

    # --- the optimizer steps ---------------------------------------------------------------------------------------

    def apply(self, accumulated: Accumulated, *, learning_rates: Sequence[float]) -> StepResult:
        """Take up to one optimizer step per rate; return metrics. Raises NonFiniteStep if the first is not finite."""
        batch, mini_batching = accumulated.batch, accumulated.batch.rules.mini_batching
        updates = [self._update(accumulated.first, number=0, rate=learning_rates[0])]
        ended = {"ended_by_kl": 0.0, "ended_not_finite": 0.0}
        for number, (rate, mini_batch) in enumerate(zip(learning_rates[1:], accumulated.rest, strict=False), start=1):
            try:
                gradient = self._gradient(mini_batch)
                tokens = trained_tokens(gradient.trained, gradient.logprobs)
                kl = statistics(batch.objective, tokens).get(KL_OLD, 0.0)
                if mini_batching.target_kl is not None and kl > mini_batching.target_kl:
                    self.discard()
                    ended["ended_by_kl"] = 1.0
                    break
                updates.append(self._update(gradient, number=number, rate=rate))
            except NonFiniteStep as error:
                log.error("step %d ends after %d optimizer steps: %s not finite", batch.producing, number, error)
                ended["ended_not_finite"] = 1.0
                break
        figures = {
            **batch.stats,
            **figures_of(updates),
            **(self.passes.history.figures() if self.passes.history else {}),
            **_kl_reference(batch),
            **accumulated.measured.figures,
        }
        if mini_batching.updates == 1:
            return StepResult(figures, [])
        return StepResult(figures | {"optimizer_steps": float(len(updates))} | ended, [*map(_figures_of_one, updates)])

    def _update(self, gradient: Gradient, *, number: int, rate: float) -> Update:
        """Take the critic's optimizer step, then the policy's; `number` is the step's number in the batch, from 0."""
        batch, taken = gradient.batch, None
        with self._clean_on_failure():
            if (critic := self.critic) is not None:
                with naming("critic's gradient", batch.orders):
                    factor = critic.schedule.factor(batch.optimizer_steps[number])
                    taken = critic.worker.optimizer_step(learning_rate=critic.learning_rate * factor)
            try:
                policy = self.policy.optimizer_step(learning_rate=0.0 if self._stands_still(batch) else rate)
            except NonFiniteError as error:
                # In the critic's warm-up the policy has no losses to check.
                for place, loss in enumerate(gradient.losses):
                    batch.check_terms(place, loss.predictions)
                raise NonFiniteStep("model's gradient", batch.orders) from error
        return Update(gradient=gradient, policy=policy, critic=taken)


def weighed_for_critic(micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
    """Weight all tokens of loss stream `RL` equally, and mask others; return new micro-batches."""
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


# --- statistics -------------------------------------------------------------------------------------------------------


def figures_of(updates: Sequence[Update]) -> dict[str, float]:
    """Return the metrics of a step that made these updates."""
    first, tokens = updates[0].gradient, _tokens(updates)
    held_version = first.batch.producing - 1
    streamed = first.batch.rules.losses.objective(first.batch.objective)
    compared = causes.sampled_tokens(first.trained, first.logprobs)
    metrics = {
        **statistics(streamed, tokens),
        **causes.figures(compared, held_version=held_version, cuts=cuts(streamed, _tokens(updates[:1]))),
    }
    if len(updates) > 1 and (sampled := causes.sampled_tokens(*_trained(updates))) is not None:
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


def _figures_of_one(update: Update) -> dict[str, float]:
    gradient, batch = update.gradient, update.gradient.batch
    measured = statistics(batch.rules.losses.objective(batch.objective), _tokens([update]))
    epoch, mini_batch = divmod(batch.number, batch.rules.mini_batching.mini_batches)
    return {
        "epoch": epoch + 1.0,
        "mini_batch": mini_batch + 1.0,
        "loss": _loss(gradient.losses),
        "grad_norm": update.policy.grad_norm,
        "learning_rate": update.policy.learning_rate,
        "tokens": float(sum(batch.loss_mask.sum() for batch in gradient.trained)),
        **{name: measured[name] for name in _PER_UPDATE if name in measured},
        **({"value_loss": _loss(gradient.value_losses)} if update.critic else {}),
    }


def _trained(updates: Sequence[Update]) -> tuple[list[MicroBatch], list[Float32]]:
    gradients = [update.gradient for update in updates]
    return [batch for each in gradients for batch in each.trained], [row for each in gradients for row in each.logprobs]


def _tokens(updates: Sequence[Update]) -> Tokens | None:
    return trained_tokens(*_trained(updates))


def _loss(losses: Sequence[LossStats]) -> float:
    return float(sum(loss.loss for loss in losses))


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


def _kl_reference(batch: TrainBatch) -> dict[str, float]:
    """Return K1 of KL(sampler ‖ reference), of tokens with RL loss, and of KL(sampler ‖ teacher), if known."""
    metrics: dict[str, float] = {}
    reads = "ref_logprobs" in batch.objective.passes
    for name, loss in ((KL_FIGURE, Loss.RL), ("kl_teacher", Loss.REF_KL)):
        differences = [
            (each.behavior_logprobs - each.ref_logprobs)[only(each, loss).loss_mask]
            for each in batch.micro_batches
            if each.ref_logprobs is not None and (loss is not Loss.RL or reads)
        ]
        joined = np.concatenate([np.zeros(0, np.float32), *differences])
        metrics |= {name: float(joined.mean(dtype=np.float64))} if joined.size else {}
    return metrics
