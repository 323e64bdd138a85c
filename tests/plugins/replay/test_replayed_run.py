"""Replayed training steps are bit-identical to the recorded ones; steps computed from other data are detected."""

from dataclasses import replace

import pytest
from rich.console import Console

from pipelinerl import rng
from pipelinerl.config.recipe import load, save as save_recipe, write_layout
from pipelinerl.enums import OldLogprobs
from pipelinerl.errors import RecordError, UserError
from pipelinerl.objective.presets import resolve
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.bigram.trainer import BigramTrainer
from pipelinerl.plugins.replay.recorded_run import RecordedStep
from pipelinerl.plugins.replay.replayed_run import Replay, _checkpoint_before, show
from pipelinerl.roles.wiring import checkpoints_of
from pipelinerl.training.batch import BatchRules, MiniBatching, build
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.passes import ForwardPasses
from pipelinerl.training.rollouts.admission import Lineage
from pipelinerl.training.schedule import AdaptiveObjective
from pipelinerl.training.step import Step
from pipelinerl.training.weight_history import WeightHistory
from tests.fakes.checkpoints import model_directory, save
from tests.fakes.rollouts import group, rollout
from trainer_contract.types import TrainerSpec

GROUPS = {index: [group(index, (0.0, 1.0, 0.5), version=index // 4)] for index in range(12)}


@pytest.fixture
def model(tmp_path):
    BigramModel.random(7, seed=4).save(tmp_path)
    return tmp_path


def replay(
    model,
    groups=GROUPS,
    *,
    chosen="grpo",
    mini_batching=MiniBatching(),  # frozen
):
    trainer = BigramTrainer()
    trainer.init_worker(TrainerSpec(model_path=model))
    objective = AdaptiveObjective(resolve(chosen, max_tokens=8), controller=None)
    rules = BatchRules(token_budget=64, mini_batching=mini_batching)
    return Replay(step=Step(rules=rules, passes=ForwardPasses(policy=trainer)), objective=objective, groups=groups)


def recorded(model, chosen="grpo"):
    """Take three training steps of four groups each; return them as a run records them."""
    taking, steps = replay(model, chosen=chosen), []
    for version in (1, 2, 3):
        orders = range(4 * version - 4, 4 * version)
        blank = RecordedStep(
            version=version, lineage=Lineage(1, 0), orders=tuple(orders), figures={"learning_rate": 0.1 * version}
        )
        (taken,) = replace(taking, began_at=version - 1).run([blank])
        steps.append(replace(blank, figures=taken.figures))
    return steps


@pytest.mark.parametrize("chosen", ["grpo", "rae", "clip_cov", "kl_cov"])
def test_replayed_steps_are_bit_identical_to_the_recorded_ones(model, chosen):
    again = list(replay(model, chosen=chosen).run(recorded(model, chosen)))
    assert [each.differences for each in again] == [{}, {}, {}]
    assert len({each.figures["loss"] for each in again}) == 3, "the steps are not all alike"


def test_replay_reports_the_metrics_that_differ_because_of_other_weights_or_rewards(model):
    steps = recorded(model)
    hotter = replace(steps[0], figures={**steps[0].figures, "learning_rate": 0.1001})
    first, second, _ = replay(model).run([hotter, *steps[1:]])
    assert first.differences == {} and "loss" in second.differences
    wrong = {**GROUPS, 1: [group(1, (1.0, 1.0, 0.5))]}
    (replayed,) = replay(model, wrong).run(steps[:1])
    assert {"reward", "loss", "grad_norm"} <= replayed.differences.keys()


def test_replay_ignores_a_copy_of_a_group_whose_sampling_weights_were_abandoned(model):
    steps = [replace(step, lineage=Lineage(2, 0)) for step in recorded(model)]
    epoch_two = {index: [group(index, (0.0, 1.0, 0.5), version=index // 4, epoch=2)] for index in range(12)}
    abandoned = group(5, (1.0, 0.0, 0.0), version=1, epoch=1)
    again = replay(model, {**epoch_two, 5: [abandoned, *epoch_two[5]]})
    assert [each.differences for each in again.run(steps)] == [{}, {}, {}]


def test_replay_with_another_objective_uses_the_recorded_rollouts(model):
    steps = recorded(model)
    taking = replay(model)
    list(taking.run(steps[:2]))
    instead = taking.instead(steps[2], resolve("cispo"))
    assert instead.figures["reward"] == steps[2].figures["reward"]
    assert instead.figures["grad_norm"] != steps[2].figures["grad_norm"]


def test_error_of_a_replay_names_the_group_or_step_that_is_missing_from_the_record(model):
    steps = recorded(model)
    with pytest.raises(RecordError, match="the group of order 2, of step 1, is not in the streams any more"):
        list(replay(model, {index: kept for index, kept in GROUPS.items() if index != 2}).run(steps))
    with pytest.raises(RecordError, match="the step after version 0 is not recorded, the next is 2"):
        list(replay(model).run(steps[1:]))


def at_sampling_weights(model, *, acceptance):
    """Return a replay that must keep older weights, to compute old log-probs with the weights that sampled."""
    taking = replay(model)
    policy = taking.step.passes.policy
    passes = ForwardPasses(
        policy=policy, old_logprobs=OldLogprobs.SAMPLING_WEIGHTS, history=WeightHistory(policy.weight_layout())
    )
    objective = AdaptiveObjective(resolve("decoupled_ppo"), controller=None)
    return replace(taking, step=replace(taking.step, passes=passes), objective=objective, acceptance=acceptance)


def test_replay_keeps_older_weights_as_long_as_later_steps_train_on_their_samples(model):
    """Step 3 trains on samples of versions 1 and 2, so the replay must still have the weights of version 1."""
    blanks = [
        RecordedStep(version=version, lineage=Lineage(1, 0), orders=orders, figures={"learning_rate": 0.1})
        for version, orders in ((1, (0, 1)), (2, (2, 4)), (3, (5, 8)))
    ]
    steps = [
        replace(blank, figures=blank.figures | taken.figures)
        for blank, taken in zip(blanks, at_sampling_weights(model, acceptance=2).run(blanks), strict=True)
    ]
    assert max(step.figures["staleness_max"] for step in steps) == 2
    assert [each.differences for each in at_sampling_weights(model, acceptance=2).run(steps)] == [{}, {}, {}]
    with pytest.raises(RecordError, match="the weights of version 0 are no longer kept"):
        list(at_sampling_weights(model, acceptance=1).run(steps))


def various(index):
    """Return a group whose rollouts differ from those of every other group."""
    draw = rng.generator(index, "various")
    rollouts = [
        rollout(reward=reward, sampled=draw.integers(0, 7, 3 + index % 4).tolist()) for reward in (0.0, 1.0, 0.5)
    ]
    return replace(group(index, (), version=0), rollouts=tuple(rollouts))


def test_replayed_steps_with_several_optimizer_steps_are_bit_identical_even_after_loading_a_saved_state(
    model, tmp_path
):
    mini_batching = MiniBatching(epochs=2, mini_batches=2, seed=3)
    groups = {index: [various(index)] for index in range(12)}
    running = replay(model, groups, mini_batching=mini_batching)
    steps, saved = [], tmp_path / "saved"
    for version in (1, 2, 3):
        orders = range(4 * version - 4, 4 * version)
        its = [groups[index][0] for index in orders]
        batch = build(its, running.step.rules, objective=resolve("grpo"), producing=version)
        rates = [0.1 / (version + number) for number in range(4)]
        figures, updates = running.step.apply(running.step.accumulate(batch), learning_rates=rates)
        steps.append(
            RecordedStep(version=version, lineage=Lineage(1, 0), orders=orders, figures=figures, updates=updates)
        )
        if version == 2:
            saved.mkdir()
            running.step.passes.policy.save_state(saved)
    assert [len(step.updates) for step in steps] == [4, 4, 4]
    again = list(replay(model, groups, mini_batching=mini_batching).run(steps))
    assert [each.differences for each in again] == [{}, {}, {}]
    restored = BigramTrainer()
    restored.init_worker(TrainerSpec(model_path=model, restore_from=saved))
    step = replace(running.step, passes=ForwardPasses(policy=restored))
    resumed = replace(replay(model, groups), began_at=2, step=step)
    (third,) = resumed.run(steps[2:])
    assert third.differences == {}
    (other,) = replay(model, groups, mini_batching=replace(mini_batching, seed=4)).run(steps[:1])
    assert other.differences, "other mini-batches are another step"


@pytest.mark.parametrize(
    ("preset", "sentence"),
    [("grpo_kl", "grpo_kl needs ref_logprobs, for which this run has no weights"), ("ppo", "ppo needs values"),
     ("grpoo", "objective.preset must be one of")],
)  # fmt: skip
def test_replay_with_an_objective_that_the_run_cannot_compute_is_rejected(tmp_path, preset, sentence):
    save_recipe(load("tiny"), tmp_path / "recipe.toml")
    write_layout(tmp_path)
    with pytest.raises(UserError, match=sentence):
        show(tmp_path, step=1, objective=preset, console=Console())


def test_replay_starts_at_the_newest_intact_checkpoint_before_the_step(tmp_path):
    config = load("tiny")
    directory = checkpoints_of(config, tmp_path).directory
    store = CheckpointStore(directory, keep=3, model_directory=model_directory(tmp_path / "model"))
    paths = [save(store, version) for version in (1, 2, 3)]
    (paths[1] / "trainer" / "optimizer").write_bytes(b"damaged")
    assert _checkpoint_before(config, tmp_path, 3)[0] == paths[0], "the second is damaged, the third too late"
    assert _checkpoint_before(config, tmp_path, 4)[0] == paths[2]
    assert _checkpoint_before(config, tmp_path, 1)[0] is None
