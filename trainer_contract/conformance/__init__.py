"""The conformance kit for trainers; each check tests one promise of the contract on a small model.

    results = run(TrainerUnderTest(factory=MyTrainer, spec=TrainerSpec(model_path=…), vocab_size=64), directory=tmp)
    assert all(result.status is Status.PASSED for result in results)

With eps = 1 and no clipping, AdamW's first step is lr·g/(|g| + 1). The change of the weights therefore reveals the
gradient g, which the kit compares with the change of the loss. Adapters are merged into the weights, whose change does
not reveal g, so they need another check (`loss_decrease_matches_the_gradient`).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np

from trainer_contract.conformance.probes import (
    LINEAR,
    CheckUnsupported,
    ColumnObjective,
    Learns,
    LinearObjective,
    TrainerUnderTest,
    check_small_step,
    every_next_token,
    loss_decrease_is_clipped,
    loss_decrease_matches_the_gradient,
    norm_of,
    pack,
    require,
    require_equal,
    require_raises,
    require_same_weights,
    rollouts_of,
    started,
    stepped,
    warmed_up,
    weights_of,
)
from trainer_contract.conformance.step_checks import (
    concurrent_reads_see_the_last_step,
    empty_steps_change_no_weight,
    forward_at_has_no_side_effect,
    forward_at_refuses_foreign_weights,
    forward_at_uses_the_given_weights,
    measures_match_the_distribution,
    value_heads_have_no_distribution,
    values_belong_to_prior_states,
)
from trainer_contract.errors import BatchError, NonFiniteError, ProtocolError, SpecError, StateError
from trainer_contract.types import Head

_LOGPROB_TOLERANCE: Final = 2e-4
_WEIGHT_TOLERANCE: Final = 2e-5


class Status(StrEnum):
    """Outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class TrainerCheckResult:
    """A check's name, its promise in one line, and its outcome."""

    name: str
    promise: str
    status: Status
    reason: str = ""


def run(
    subject: TrainerUnderTest,
    *,
    directory: Path,
    checks: Sequence[Callable[[TrainerUnderTest, Path], None]] | None = None,
) -> list[TrainerCheckResult]:
    """Run `checks` (default: all for the subject's head), each in an empty directory; return a result for each."""
    results = []
    suite = CHECKS if subject.spec.head is Head.POLICY else VALUE_CHECKS
    for check in suite if checks is None else checks:
        place = directory / check.__name__
        place.mkdir(parents=True)
        promise = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
        status, reason = Status.PASSED, ""
        try:
            check(subject, place)
        except CheckUnsupported as error:
            status, reason = Status.UNSUPPORTED, str(error)
        except AssertionError as error:
            status, reason = Status.FAILED, str(error)
        except Exception as error:  # the tested trainer may raise anything; any exception is a failure of the check
            where = traceback.extract_tb(error.__traceback__)[-1]
            place_of_error = f"{Path(where.filename).name}:{where.lineno}"
            status, reason = Status.FAILED, f"{type(error).__name__}: {error} ({place_of_error})"
        results.append(TrainerCheckResult(check.__name__, promise, status, reason))
    return results


# --- forward -----------------------------------------------------------------------------------------------------


def forward_is_a_distribution(subject: TrainerUnderTest, _: Path) -> None:
    """The probabilities of all next tokens sum to 1, and the temperature divides the logits once."""
    continuations, trainer = every_next_token(subject), started(subject)
    plain = trainer.forward([pack(continuations)])[0][1::2].astype(np.float64)
    require_equal(np.exp(plain).sum(), 1.0, 1e-3, "the sum of all next tokens' probabilities")
    cooled = plain / 0.5
    cooled -= np.log(np.exp(cooled - cooled.max()).sum()) + cooled.max()
    require_equal(
        trainer.forward([pack(continuations, temperature=0.5)])[0][1::2], cooled, 1e-3, "log-probs at temperature 0.5"
    )


def forward_starts_at_zero(subject: TrainerUnderTest, _: Path) -> None:
    """Predictions are f32 [T], 0 at the first token of a segment and nonzero elsewhere."""
    batch = pack(rollouts_of(subject.vocab_size), prompt=2)
    predictions = warmed_up(subject).forward([batch])[0]
    elsewhere = predictions[batch.position_ids > 0]
    require(str(getattr(predictions, "dtype", None)) == "float32", "forward must return a numpy f32 array")
    require(predictions.shape == (batch.num_tokens,), f"forward must return shape [T], got {predictions.shape}")
    require(bool((predictions[batch.position_ids == 0] == 0).all()), "predictions at segment starts must be 0")
    require(bool((elsewhere != 0).all()), "predictions elsewhere must not be 0, prompts included")
    if subject.spec.head is Head.POLICY:
        require(bool((elsewhere < 0).all()), "log-probs elsewhere must be negative, prompts included")


def segments_are_independent(subject: TrainerUnderTest, _: Path) -> None:
    """A rollout has the same predictions alone and packed with others."""
    trainer, rollouts = warmed_up(subject), rollouts_of(subject.vocab_size)
    alone = np.concatenate([trainer.forward([pack([rollout])])[0] for rollout in rollouts])
    packed = trainer.forward([pack(rollouts)])[0]
    require_equal(packed, alone, _LOGPROB_TOLERANCE, "packed predictions, compared with each rollout's alone")


def forward_is_causal(subject: TrainerUnderTest, _: Path) -> None:
    """A token's prediction does not depend on later tokens."""
    trainer, (rollout, *_rest) = warmed_up(subject), rollouts_of(subject.vocab_size, lengths=(8,))
    changed = [*rollout[:5], *((token + 1) % subject.vocab_size for token in rollout[5:])]
    before, after = trainer.forward([pack([rollout])])[0], trainer.forward([pack([changed])])[0]
    require_equal(after[:5], before[:5], _LOGPROB_TOLERANCE, "predictions before the first changed token")


def forward_has_no_side_effect(subject: TrainerUnderTest, _: Path) -> None:
    """`forward` accumulates no gradient and changes no weight."""
    trainer = started(subject)
    before = weights_of(trainer)
    trainer.forward([pack(rollouts_of(subject.vocab_size))])
    require_raises(
        ProtocolError, lambda: trainer.optimizer_step(learning_rate=0.1), "optimizer_step after forward alone"
    )
    require_same_weights(weights_of(trainer), before, 0.0, "weights after forward")


# --- backward and step -------------------------------------------------------------------------------------------


def loss_matches_forward(subject: TrainerUnderTest, _: Path) -> None:
    """`backward` returns the objective's value for the predictions of `forward`."""
    trainer, batch = warmed_up(subject), pack(rollouts_of(subject.vocab_size), prompt=2, temperature=0.7)
    expected = -(trainer.forward([batch])[0] * batch.weights * batch.advantages).sum()
    stats = trainer.backward([batch], LINEAR)[0]
    require_equal(stats.loss, expected, _LOGPROB_TOLERANCE * batch.num_tokens, "the loss")
    predictions, got = np.where(batch.loss_mask, trainer.forward([batch])[0], 0.0), stats.predictions
    require(got.shape == predictions.shape, f"LossStats.predictions must be [T], got {got.shape}")
    require_equal(got, predictions, _LOGPROB_TOLERANCE, "LossStats.predictions, 0 outside the mask,")


def optional_columns_reach_the_objective(subject: TrainerUnderTest, _: Path) -> None:
    """The objective receives the columns `rollout_ids` and `streams` of the micro-batch."""
    trainer, batch = warmed_up(subject), pack(rollouts_of(subject.vocab_size))
    owners = (np.arange(batch.num_segments, dtype=np.int32) // 2)[batch.segment_ids]
    streams = (batch.position_ids % 3).astype(np.int32)
    given, predictions = replace(batch, rollout_ids=owners, streams=streams), trainer.forward([batch])[0]
    for name, column in (("rollout_ids", owners), ("streams", streams)):
        stats = trainer.backward([given], ColumnObjective(name))[0]
        expected = -(predictions * batch.weights * (1 + column)).sum()
        require_equal(stats.loss, expected, _LOGPROB_TOLERANCE * batch.num_tokens, f"the loss of a term of {name}")


def gradient_matches_the_loss(subject: TrainerUnderTest, _: Path) -> None:
    """A small step along the gradient changes the loss as predicted, and `grad_norm` is the gradient's norm."""
    batch = pack(rollouts_of(subject.vocab_size), temperature=0.7)
    if subject.learns is Learns.ADAPTERS:
        loss_decrease_matches_the_gradient(subject, batch, LINEAR)
        return
    step = check_small_step(subject, batch, LINEAR, rate=1e-2, what="a small step")
    require_equal(norm_of(step.gradient), step.norm, 0.02 * step.norm, "the gradient's norm, inferred from the weights")


def clipping_bounds_the_norm(subject: TrainerUnderTest, _: Path) -> None:
    """A gradient with a norm above `grad_clip` is scaled down to it; `grad_norm` reports the norm before clipping."""
    batch, rate = pack(rollouts_of(subject.vocab_size)), 1e-2
    if subject.learns is Learns.ADAPTERS:
        loss_decrease_is_clipped(subject, batch, LINEAR)
        return
    full = stepped(started(subject), [batch], rate)
    clip = full.norm / 2
    clipped = stepped(started(subject, grad_clip=clip), [batch], rate)
    require_equal(clipped.norm, full.norm, 1e-3 * full.norm, "grad_norm with clipping, which is reported before it")
    require_equal(norm_of(clipped.gradient), clip, 0.02 * clip, "the norm of the gradient applied")


def parts_equal_the_whole(subject: TrainerUnderTest, _: Path) -> None:
    """`backward` accumulates the same gradient if a batch is split, in one call or several; results are in order."""
    rollouts = rollouts_of(subject.vocab_size)
    parts = [pack(rollouts[:1]), pack(rollouts[1:4]), pack(rollouts[4:])]
    whole = stepped(started(subject), [pack(rollouts)])
    together = stepped(started(subject), parts)
    require_equal(together.norm, whole.norm, 1e-3 * whole.norm, "grad_norm after three parts")
    require_same_weights(together.weights, whole.weights, _WEIGHT_TOLERANCE, "weights after a step on three parts")
    apart = started(subject)
    alone = [*apart.backward(parts[:1], LINEAR), *apart.backward(parts[1:], LINEAR)]
    norm = apart.optimizer_step(learning_rate=0.1).grad_norm
    require_equal(norm, whole.norm, 1e-3 * whole.norm, "grad_norm after two calls")
    require_same_weights(weights_of(apart), whole.weights, _WEIGHT_TOLERANCE, "weights after a step on two calls")
    for part, before, stats in zip(parts, started(subject).forward(parts), alone, strict=True):
        place = f"of a part of {part.num_tokens} tokens, in its position,"
        require(before.shape == stats.predictions.shape == (part.num_tokens,), f"predictions {place}")
        require_equal(stats.predictions, np.where(part.loss_mask, before, 0.0), _LOGPROB_TOLERANCE, f"those {place}")
        require_equal(
            stats.loss, -(before * part.weights * part.advantages).sum(), _LOGPROB_TOLERANCE * 8, f"the loss {place}"
        )


def order_does_not_matter(subject: TrainerUnderTest, _: Path) -> None:
    """The order of rollouts in a batch does not change the step."""
    rollouts = rollouts_of(subject.vocab_size)
    forwards, backwards = stepped(started(subject), [pack(rollouts)]), stepped(started(subject), [pack(rollouts[::-1])])
    require_same_weights(
        backwards.weights, forwards.weights, _WEIGHT_TOLERANCE, "weights after a step on the rollouts reversed"
    )


def step_applies_and_clears(subject: TrainerUnderTest, _: Path) -> None:
    """`optimizer_step` raises the version by one, changes weights, and leaves no gradient behind."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    require_raises(ProtocolError, lambda: trainer.optimizer_step(learning_rate=0.1), "optimizer_step on a new trainer")
    first, before = trainer.model_version, weights_of(trainer)
    trainer.backward([batch], LINEAR)
    require_same_weights(weights_of(trainer), before, 0.0, "weights after backward alone")
    stats = trainer.optimizer_step(learning_rate=0.1)
    require(
        stats.model_version == trainer.model_version == first + 1,
        f"model_version must be {first + 1} after a step, got {stats.model_version} and {trainer.model_version}",
    )
    after = weights_of(trainer)
    require(any(not np.array_equal(before[name], after[name]) for name in before), "the step changed no weight")
    require_raises(ProtocolError, lambda: trainer.optimizer_step(learning_rate=0.1), "a second step without backward")


def discard_clears_the_gradient(subject: TrainerUnderTest, _: Path) -> None:
    """A step after `discard_gradient` is the same as if the discarded backward had not run."""
    rollouts = rollouts_of(subject.vocab_size)
    trainer = started(subject)
    trainer.backward([pack(rollouts[:3])], LINEAR)
    trainer.discard_gradient()
    require_raises(ProtocolError, lambda: trainer.optimizer_step(learning_rate=0.1), "a step after discard_gradient")
    after = stepped(trainer, [pack(rollouts[3:])])
    fresh = stepped(started(subject), [pack(rollouts[3:])])
    require_same_weights(after.weights, fresh.weights, _WEIGHT_TOLERANCE, "weights after discard and a step")


# --- refusals ----------------------------------------------------------------------------------------------------


def non_finite_is_refused(subject: TrainerUnderTest, _: Path) -> None:
    """A NaN or infinite advantage raises NonFiniteError; no gradient is accumulated and training can continue."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    before = weights_of(trainer)
    bad, first = [], np.arange(batch.num_tokens) == np.flatnonzero(batch.loss_mask)[0]
    for poison in (np.nan, np.inf):
        bad.append(replace(batch, advantages=np.where(first, np.float32(poison), batch.advantages)))
    for place, sequence in enumerate(([bad[0], batch], [batch, bad[1]], [batch, batch, bad[0]])):
        try:
            with np.errstate(invalid="ignore"):
                trainer.backward(sequence, LINEAR)
        except NonFiniteError as error:
            require(error.number == place, f"NonFiniteError.number must be {place}, got {error.number}")
        else:
            require(False, f"backward must raise NonFiniteError for an advantage of micro-batch {place} of a sequence")
    require_raises(ProtocolError, lambda: trainer.optimizer_step(learning_rate=0.1), "a step after a refused backward")
    require_same_weights(weights_of(trainer), before, 0.0, "weights after a refused backward")
    healthy, fresh = stepped(trainer, [batch]), stepped(started(subject), [batch])
    require_same_weights(
        healthy.weights, fresh.weights, _WEIGHT_TOLERANCE, "weights after a refused backward and a step"
    )


def malformed_batches_are_refused(subject: TrainerUnderTest, _: Path) -> None:
    """Each malformed batch and each missing column raises BatchError before anything is computed."""
    trainer, batch = started(subject), pack(rollouts_of(subject.vocab_size))
    starts = batch.loss_mask | (batch.position_ids == 0)
    broken = {
        "a short column": replace(batch, advantages=batch.advantages[1:]),
        "f64 advantages": replace(batch, advantages=batch.advantages.astype(np.float64)),
        "a token beyond the vocabulary": replace(batch, token_ids=batch.token_ids + np.int32(subject.vocab_size)),
        "positions that do not restart": replace(batch, position_ids=np.arange(batch.num_tokens, dtype=np.int32)),
        "segments that decrease": replace(batch, segment_ids=batch.segment_ids[::-1].copy()),
        "a wrong num_segments": replace(batch, num_segments=batch.num_segments + 1),
        "a mask on a segment's first token": replace(batch, loss_mask=starts),
        "a rollout of half a segment": replace(batch, rollout_ids=np.minimum(batch.position_ids, 1)),
        "temperature 0": replace(batch, temperatures=np.zeros_like(batch.temperatures)),
    }
    for what, bad in broken.items():
        require_raises(BatchError, partial(trainer.backward, [batch, bad], LINEAR), f"backward with {what}")
        require_raises(BatchError, partial(trainer.forward, [batch, bad]), f"forward with {what}")
    needy = LinearObjective(needs=frozenset({"old_logprobs"}))
    require_raises(
        BatchError, lambda: trainer.backward([batch], needy)[0], "backward without a column that the objective needs"
    )


def missing_model_is_refused(subject: TrainerUnderTest, directory: Path) -> None:
    """A missing model directory raises SpecError."""
    absent = replace(subject.spec, model_path=directory / "absent", restore_from=None)
    require_raises(SpecError, lambda: subject.factory().init_worker(absent), "init_worker without a model")


def unknown_options_are_refused(subject: TrainerUnderTest, _: Path) -> None:
    """An unknown backend option raises SpecError instead of being ignored."""
    spec = replace(subject.spec, options={"no_such_option": 1})
    require_raises(SpecError, lambda: subject.factory().init_worker(spec), "init_worker with an unknown option")


# --- weights and state -------------------------------------------------------------------------------------------


def layout_matches_gathered_weights(subject: TrainerUnderTest, _: Path) -> None:
    """`weight_layout` lists the names, order, shapes and dtypes that `gather_weights` yields, each name once."""
    trainer = started(subject)
    layout = [(info.name, tuple(info.shape), info.dtype) for info in trainer.weight_layout()]
    gathered = [(name, tuple(a.shape), str(a.dtype).removeprefix("torch.")) for name, a in trainer.gather_weights()]
    require(bool(layout), "weight_layout is empty")
    require(len({name for name, *_ in layout}) == len(layout), "a parameter is listed twice")
    require(len(layout) == len(gathered), f"the layout lists {len(layout)} parameters, {len(gathered)} are gathered")
    for listed, got in zip(layout, gathered, strict=True):
        require(listed == got, f"the layout lists {listed}, gathered is {got}")


def state_continues_exactly(subject: TrainerUnderTest, directory: Path) -> None:
    """Training continues bit for bit after save and restore, in losses, norms, weights and version."""
    rollouts = rollouts_of(subject.vocab_size)
    batches = [pack(rollouts[:3]), pack(rollouts[3:]), pack(rollouts[1:5])]
    trainer = started(subject)
    stepped(trainer, batches[:1])
    stepped(trainer, batches[1:2])
    trainer.save_state(directory)
    version = trainer.model_version
    undisturbed = [stepped(trainer, [batch]) for batch in batches]
    restored = started(subject, restore_from=directory)
    require(restored.model_version == version, f"the restored version must be {version}, got {restored.model_version}")
    for step, (batch, expected) in enumerate(zip(batches, undisturbed, strict=True)):
        got = stepped(restored, [batch])
        numbers, right = (got.loss, got.norm), (expected.loss, expected.norm)
        require(numbers == right, f"step {step} after the restore gave loss and norm {numbers}, not {right}")
        require_same_weights(got.weights, expected.weights, 0.0, f"weights after step {step} of the restored trainer")


def broken_state_is_refused(subject: TrainerUnderTest, directory: Path) -> None:
    """A state that is missing, truncated, or lacks a file raises StateError."""
    empty, saved = directory / "empty", directory / "saved"
    empty.mkdir()
    saved.mkdir()
    require_raises(StateError, lambda: started(subject, restore_from=empty), "restoring from an empty directory")
    require_raises(
        StateError, lambda: started(subject, restore_from=directory / "absent"), "restoring from a missing directory"
    )
    trainer = started(subject)
    stepped(trainer, [pack(rollouts_of(subject.vocab_size))])
    trainer.save_state(saved)
    largest = max((file for file in saved.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = largest.read_bytes()
    largest.write_bytes(content[: len(content) // 2])
    require_raises(StateError, lambda: started(subject, restore_from=saved), f"restoring with {largest.name} cut short")
    largest.unlink()
    require_raises(StateError, lambda: started(subject, restore_from=saved), f"restoring without {largest.name}")


CHECKS: Final[tuple[Callable[[TrainerUnderTest, Path], None], ...]] = (
    forward_is_a_distribution,
    forward_starts_at_zero,
    segments_are_independent,
    forward_is_causal,
    forward_has_no_side_effect,
    forward_at_uses_the_given_weights,
    forward_at_has_no_side_effect,
    forward_at_refuses_foreign_weights,
    measures_match_the_distribution,
    loss_matches_forward,
    optional_columns_reach_the_objective,
    gradient_matches_the_loss,
    clipping_bounds_the_norm,
    parts_equal_the_whole,
    order_does_not_matter,
    step_applies_and_clears,
    empty_steps_change_no_weight,
    discard_clears_the_gradient,
    non_finite_is_refused,
    malformed_batches_are_refused,
    missing_model_is_refused,
    unknown_options_are_refused,
    layout_matches_gathered_weights,
    state_continues_exactly,
    concurrent_reads_see_the_last_step,
    broken_state_is_refused,
)

#: The checks of a trainer with a value head.
VALUE_CHECKS: Final = (
    *(check for check in CHECKS if check not in (forward_is_a_distribution, measures_match_the_distribution)),
    value_heads_have_no_distribution,
    values_belong_to_prior_states,
)
