"""Tests of the conformance kit for trainers: a correct trainer passes; a broken one fails the check for its fault."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from trainer_contract.conformance import CHECKS, VALUE_CHECKS, Status, run
from trainer_contract.conformance.probes import LINEAR, Learns, TrainerUnderTest
from trainer_contract.errors import NonFiniteError, SpecError, StateError
from trainer_contract.types import Head, LossStats, MeasuringObjective, StepStats, TrainerSpec, measures_of

VOCAB = 16


class Broken:
    """A bigram trainer in which some verbs (methods of the trainer contract) are broken.

    `verbs` maps a verb's name to its broken replacement, a function of the correct trainer and the verb's arguments.
    Replacements of `forward` and `backward` are called for each micro-batch, those named `whole_forward` and
    `whole_backward` once for all micro-batches.
    """

    def __init__(self, **verbs):
        self._sound, self._verbs = BigramTrainer(), verbs

    def __getattr__(self, name):
        if f"whole_{name}" in self._verbs:
            verb, sound = self._verbs[f"whole_{name}"], self._sound
            return lambda *a: verb(sound, *a)
        if name in self._verbs:
            verb, sound = self._verbs[name], self._sound
            if name in ("forward", "backward"):
                return lambda batches, *a: [verb(sound, batch, *a) for batch in batches]
            return verb(sound) if name == "model_version" else lambda *a, **k: verb(sound, *a, **k)
        return getattr(self._sound, name)


def leaking(sound, batch):
    """Return log-probs that are wrong in all but the first segment, as if segments depended on earlier segments."""
    logprobs = sound.forward([batch])[0].copy()
    logprobs[1:] += np.where(batch.segment_ids[1:] > 0, 0.01, 0.0) * (batch.position_ids[1:] > 0)
    return logprobs


def looking_ahead(sound, batch):
    return sound.forward([batch])[0] - 0.01 * (batch.token_ids[-1] + 1) * (batch.position_ids > 0)


def tempered_twice(sound, batch):
    return sound.forward([replace(batch, temperatures=batch.temperatures**2)])[0]


def starts_not_zero(sound, batch):
    return sound.forward([batch])[0] - (batch.position_ids == 0).astype(np.float32)


def values_of_the_state_after(sound, batch):
    """Return values that are off by one: token t gets the value of the state after token t instead of before it."""
    values = sound.forward([batch])[0]
    shifted = np.where(batch.position_ids > 0, np.roll(values, -1), 0.0)
    last = np.append(batch.position_ids[1:] == 0, True)
    shifted[last] = sound._state.table[batch.token_ids[last]]
    return shifted.astype(np.float32)


def tempered_values(sound, batch):
    return sound.forward([batch])[0] / batch.temperatures


def steps_at_rate_zero(sound, *, learning_rate):
    return sound.optimizer_step(learning_rate=max(learning_rate, 1e-3))


def mask_only(sound, batch):
    return np.where(batch.loss_mask, sound.forward([batch])[0], 0.0).astype(np.float32)


def forward_accumulates(sound, batch):
    if sound._state.gradient is None:
        sound._state.gradient = np.ones_like(sound._state.table)
    return sound.forward([batch])[0]


def ignores_the_weights(sound, batches, weights):
    return [sound.forward([batch])[0] for batch in batches]


def rounds_the_weights(sound, batches, weights):
    rough = {name: data.view(np.float32).astype(np.float16).astype(np.float32) for name, data in weights.items()}
    return sound.forward_at(batches, {name: data.view(np.uint8) for name, data in rough.items()})


def leaves_them_loaded(sound, batches, weights):
    predictions = sound.forward_at(batches, weights)
    (given,) = weights.values()
    sound._state.table = given.view(np.float32).reshape(sound._state.table.shape).astype(np.float64)
    return predictions


def lends_its_table(sound, batches, weights):
    own, (given,) = sound._state.table, weights.values()
    sound._state.table = given.view(np.float32).reshape(own.shape).astype(np.float64)
    predictions = [sound.forward([batch])[0] for _ in range(10) for batch in batches][-len(batches) :]
    sound._state.table = own
    return predictions


def drops_the_gradient(sound, batches, weights):
    sound.discard_gradient()
    return sound.forward_at(batches, weights)


def loses_precision_afterwards(sound, batches, weights):
    sound._state.table = sound._state.table.astype(np.float32).astype(np.float64)
    return sound.forward_at(batches, weights)


def fits_anything(sound, batches, weights):
    try:
        return sound.forward_at(batches, weights)
    except StateError:
        return [sound.forward([batch])[0] for batch in batches]


def mean_over_the_micro_batch(sound, batch, objective):
    share = np.float32(1 / max(int(batch.loss_mask.sum()), 1))
    return sound.backward([replace(batch, weights=batch.weights * share)], objective)[0]


def keeps_only_the_last_part(sound, batches, objective):
    earlier = sound.backward(batches[:-1], objective)
    sound.discard_gradient()
    return [*earlier, *sound.backward(batches[-1:], objective)]


def answers_in_reverse(sound, batches, objective):
    return sound.backward(batches, objective)[::-1]


def omits_the_number(sound, batches, objective):
    try:
        return sound.backward(batches, objective)
    except NonFiniteError as error:
        raise NonFiniteError(str(error)) from error


def keeps_what_came_before(sound, batches, objective):
    try:
        return sound.backward(batches, objective)
    except NonFiniteError as error:
        sound.backward(batches[: error.number], objective)
        raise


def overwrites_the_gradient(sound, batch, objective):
    sound.discard_gradient()
    return sound.backward([batch], objective)[0]


def ascends(sound, batch, objective):
    stats = sound.backward([batch], objective)[0]
    sound._state.gradient *= -1
    return stats


def drops_the_last_segment(sound, batch, objective):
    kept = batch.loss_mask & (batch.segment_ids < batch.num_segments - 1)
    return sound.backward([replace(batch, loss_mask=kept)], objective)[0]


def takes_each_segment_for_a_rollout(sound, batch, objective):
    return sound.backward([replace(batch, rollout_ids=None)], objective)[0]


def takes_all_tokens_for_one_stream(sound, batch, objective):
    return sound.backward([replace(batch, streams=None)], objective)[0]


class WithoutMeasures:
    """An objective without the gradients with respect to its measures (quantities such as the exact entropy)."""

    def __init__(self, objective):
        self.needs, self.evaluate, self.prediction_gradient = (
            objective.needs,
            objective.evaluate,
            objective.prediction_gradient,
        )


def drops_the_gradient_of_measures(sound, batch, objective):
    return sound.backward(
        [batch], WithoutMeasures(objective) if isinstance(objective, MeasuringObjective) else objective
    )[0]


def measures_without_temperature(sound, batch, objective):
    plain = replace(batch, temperatures=np.ones_like(batch.temperatures))
    return sound.backward([plain if measures_of(objective) else batch], objective)[0]


def measures_values(sound, batch, objective):
    return sound.backward([batch], LINEAR if measures_of(objective) else objective)[0]


def swallows_nan(sound, batch, objective):
    try:
        return sound.backward([batch], objective)[0]
    except NonFiniteError:
        return LossStats(0.0, np.zeros(batch.num_tokens, np.float32))


def accumulates_before_it_refuses(sound, batch, objective):
    try:
        return sound.backward([batch], objective)[0]
    except NonFiniteError:
        sound.backward([replace(batch, advantages=np.nan_to_num(batch.advantages, posinf=0.0))], objective)
        raise


def checks_nothing(sound, batch, objective):
    try:
        return sound.backward([batch], objective)[0]
    except Exception as error:
        raise ValueError("some error of the array library") from error


def step_keeps_the_gradient(sound, *, learning_rate):
    gradient = sound._state.gradient
    stats = sound.optimizer_step(learning_rate=learning_rate)
    sound._state.gradient = gradient
    return stats


def step_without_gradient(sound, *, learning_rate):
    if sound._state.gradient is None:
        return StepStats(sound.model_version, 0.0, learning_rate)
    return sound.optimizer_step(learning_rate=learning_rate)


def ignores_options(sound, spec):
    sound.init_worker(replace(spec, options={}))


def never_clips(sound, spec):
    sound.init_worker(replace(spec, optimizer=replace(spec.optimizer, grad_clip=0.0)))


def norm_after_clipping(sound, *, learning_rate):
    stats = sound.optimizer_step(learning_rate=learning_rate)
    return replace(stats, grad_norm=min(stats.grad_norm, sound._state.spec.grad_clip or np.inf))


def discard_does_nothing(sound):
    del sound


def forgets_the_moments(sound, spec):
    sound.init_worker(spec)
    if spec.restore_from:
        sound._state.exp_avg = np.zeros_like(sound._state.exp_avg)


def restores_weights_in_half(sound, spec):
    sound.init_worker(spec)
    if spec.restore_from:
        sound._state.table = sound._state.table.astype(np.float16).astype(np.float64)


def forgets_the_version(sound, spec):
    sound.init_worker(spec)
    if spec.restore_from:
        sound._state.model_version = 0


def restarts_when_damaged(sound, spec):
    try:
        sound.init_worker(spec)
    except Exception:
        sound.init_worker(replace(spec, restore_from=None))


def half_precision(sound):
    for name, array in sound.gather_weights():
        yield name, array.astype(np.float16)


def renamed(sound):
    for name, array in sound.gather_weights():
        yield "module." + name, array


BROKEN = [
    ("segments_are_independent", {"forward": leaking}),
    ("forward_is_causal", {"forward": looking_ahead}),
    ("forward_is_a_distribution", {"forward": tempered_twice}),
    ("forward_starts_at_zero", {"forward": starts_not_zero}),
    ("forward_starts_at_zero", {"forward": mask_only}),
    ("forward_has_no_side_effect", {"forward": forward_accumulates}),
    ("forward_at_uses_the_given_weights", {"forward_at": ignores_the_weights}),
    ("forward_at_uses_the_given_weights", {"forward_at": rounds_the_weights}),
    ("forward_at_has_no_side_effect", {"forward_at": leaves_them_loaded}),
    ("forward_at_has_no_side_effect", {"forward_at": drops_the_gradient}),
    ("forward_at_has_no_side_effect", {"forward_at": loses_precision_afterwards}),
    ("forward_at_refuses_foreign_weights", {"forward_at": fits_anything}),
    ("loss_matches_forward", {"backward": mean_over_the_micro_batch}),
    ("optional_columns_reach_the_objective", {"backward": takes_each_segment_for_a_rollout}),
    ("optional_columns_reach_the_objective", {"backward": takes_all_tokens_for_one_stream}),
    ("parts_equal_the_whole", {"backward": mean_over_the_micro_batch}),
    ("parts_equal_the_whole", {"whole_backward": keeps_only_the_last_part}),
    ("parts_equal_the_whole", {"whole_backward": answers_in_reverse}),
    ("non_finite_is_refused", {"whole_backward": omits_the_number}),
    ("non_finite_is_refused", {"whole_backward": keeps_what_came_before}),
    ("parts_equal_the_whole", {"backward": overwrites_the_gradient}),
    ("order_does_not_matter", {"backward": drops_the_last_segment}),
    ("gradient_matches_the_loss", {"backward": ascends}),
    ("measures_match_the_distribution", {"backward": drops_the_gradient_of_measures}),
    ("measures_match_the_distribution", {"backward": measures_without_temperature}),
    ("non_finite_is_refused", {"backward": swallows_nan}),
    ("non_finite_is_refused", {"backward": accumulates_before_it_refuses}),
    ("malformed_batches_are_refused", {"backward": checks_nothing}),
    ("step_applies_and_clears", {"optimizer_step": step_keeps_the_gradient}),
    ("step_applies_and_clears", {"optimizer_step": step_without_gradient}),
    ("step_applies_and_clears", {"model_version": lambda sound: 0}),
    ("clipping_bounds_the_norm", {"init_worker": never_clips}),
    ("clipping_bounds_the_norm", {"optimizer_step": norm_after_clipping}),
    ("empty_steps_change_no_weight", {"optimizer_step": steps_at_rate_zero}),
    ("discard_clears_the_gradient", {"discard_gradient": discard_does_nothing}),
    ("unknown_options_are_refused", {"init_worker": ignores_options}),
    ("state_continues_exactly", {"init_worker": forgets_the_moments}),
    ("state_continues_exactly", {"init_worker": restores_weights_in_half}),
    ("state_continues_exactly", {"init_worker": forgets_the_version}),
    ("concurrent_reads_see_the_last_step", {"forward_at": lends_its_table}),
    ("broken_state_is_refused", {"init_worker": restarts_when_damaged}),
    ("layout_matches_gathered_weights", {"gather_weights": half_precision}),
    ("layout_matches_gathered_weights", {"gather_weights": renamed}),
]


def by_name(check, verbs):
    return f"{check}-{next(iter(verbs.values())).__name__}"


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    path = tmp_path_factory.mktemp("bigram")
    BigramModel.random(VOCAB, seed=1).save(path)
    return TrainerSpec(model_path=path)


@pytest.mark.parametrize("head", Head)
def test_correct_trainer_passes_every_conformance_check_of_policies_and_of_value_heads(head, spec, tmp_path):
    results = run(TrainerUnderTest(BigramTrainer, replace(spec, head=head), VOCAB), directory=tmp_path)
    assert [(r.name, r.reason) for r in results if r.status is not Status.PASSED] == []
    assert len(results) == len(CHECKS) == len(VALUE_CHECKS) and all(r.promise for r in results)


BROKEN_VALUES = [
    ("segments_are_independent", {"forward": leaking}),
    ("values_belong_to_prior_states", {"forward": values_of_the_state_after}),
    ("values_belong_to_prior_states", {"forward": tempered_values}),
    ("value_heads_have_no_distribution", {"backward": measures_values}),
    ("state_continues_exactly", {"init_worker": forgets_the_moments}),
]


@pytest.mark.parametrize(("check", "verbs"), BROKEN_VALUES, ids=[by_name(*row) for row in BROKEN_VALUES])
def test_trainer_with_a_broken_value_head_fails_the_conformance_check_for_its_fault(check, verbs, spec, tmp_path):
    subject = TrainerUnderTest(lambda: Broken(**verbs), replace(spec, head=Head.VALUE), VOCAB)
    assert check in {r.name for r in run(subject, directory=tmp_path) if r.status is Status.FAILED}


def test_conformance_checks_of_values_report_unsupported_for_a_trainer_without_value_head(spec, tmp_path):
    def refuses(sound, spec):
        if spec.head is Head.VALUE:
            raise SpecError("no values here")
        sound.init_worker(spec)

    subject = TrainerUnderTest(lambda: Broken(init_worker=refuses), replace(spec, head=Head.VALUE), VOCAB)
    results = run(subject, directory=tmp_path, checks=VALUE_CHECKS[:3])
    assert {(r.status, r.reason) for r in results} == {(Status.UNSUPPORTED, "no value head: no values here")}


@pytest.mark.parametrize(("check", "verbs"), BROKEN, ids=[by_name(*row) for row in BROKEN])
def test_broken_trainer_fails_the_conformance_check_for_its_fault(check, verbs, spec, tmp_path):
    results = run(TrainerUnderTest(lambda: Broken(**verbs), spec, VOCAB), directory=tmp_path)
    failed = {result.name: result.reason for result in results if result.status is Status.FAILED}
    assert check in failed
    assert failed[check], "a failure must give its reason"


def test_conformance_check_that_cannot_run_is_reported_as_unsupported(spec, tmp_path):
    results = run(TrainerUnderTest(BigramTrainer, spec, 10**6), directory=tmp_path, checks=CHECKS[:1])
    assert results[0].status is Status.UNSUPPORTED and "too large to sum over" in results[0].reason


def test_trainer_that_ignores_a_missing_model_fails_the_conformance_check_for_it(tmp_path, spec):
    eager = Broken(init_worker=lambda sound, _: sound.init_worker(spec))
    results = run(TrainerUnderTest(lambda: eager, spec, VOCAB), directory=tmp_path)
    assert "missing_model_is_refused" in {r.name for r in results if r.status is Status.FAILED}


def doubled_norm(sound, *, learning_rate):
    stats = sound.optimizer_step(learning_rate=learning_rate)
    return replace(stats, grad_norm=2 * stats.grad_norm)


def half_the_gradient(sound, *, learning_rate):
    return sound.optimizer_step(learning_rate=learning_rate / 2)


@pytest.mark.parametrize(
    ("verbs", "expected"),
    [
        ({}, set()),
        ({"optimizer_step": doubled_norm}, {"gradient_matches_the_loss", "clipping_bounds_the_norm"}),
        ({"init_worker": never_clips}, {"clipping_bounds_the_norm"}),
        ({"optimizer_step": half_the_gradient}, {"gradient_matches_the_loss", "clipping_bounds_the_norm"}),
    ],
)
def test_conformance_kit_detects_broken_lora_trainers_from_their_losses(verbs, expected, spec, tmp_path):
    """These checks read the loss and not the weights, so a trainer of all weights can stand in for one of adapters."""
    checks = [check for check in CHECKS if check.__name__ in ("gradient_matches_the_loss", "clipping_bounds_the_norm")]
    subject = TrainerUnderTest(lambda: Broken(**verbs), spec, VOCAB, Learns.ADAPTERS)
    results = run(subject, directory=tmp_path, checks=checks)
    assert {result.name for result in results if result.status is Status.FAILED} == expected
