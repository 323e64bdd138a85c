"""Policy, critic and reference in one process: they resume bit-exactly, and errors name the model that failed."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from pipelinerl import rng
from pipelinerl.config.recipe import parse
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.warmstart.tiny_decoder import DecoderShape, random_decoder
from pipelinerl.roles.wiring import objective_of
from pipelinerl.roles.workers import close_workers, spec_of, started
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.training.checkpoints.manifest import TrainingState
from pipelinerl.training.schedule import AdaptiveObjective
from tests.fakes.batches import batch_of
from tests.fakes.rollouts import group, rollout
from trainer_contract.conformance.probes import weights_of
from trainer_contract.types import OptimizerSpec, Precision, TrainerSpec

VOCAB = 16


def config_of(kind, path, /, **sections):
    return parse(
        {
            "model": {"path": path},
            "trainer": {"type": kind, "device": "cpu" if kind == "torch" else "auto"},
            "optimizer": {"learning_rate": 0.01},
            "domains": [{"name": "test", "source": "addition"}],
            "objective": {"preset": "ppo", "adv": {"kl": 0.05}, "grad1": {"over": "old"}},
            "kl_control": {"target": 0.01, "gain": 0.5},
            "critic": {"learning_rate": 0.02},
        }
        | sections
    )


@pytest.fixture(params=["bigram", "torch"])
def config(request, tmp_path):
    if request.param == "torch":
        shape = DecoderShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=VOCAB, max_positions=64)
        random_decoder(shape).save_pretrained(tmp_path / "model")
    else:
        BigramModel.random(VOCAB, seed=1).save(tmp_path / "model")
    return config_of(request.param, str(tmp_path / "model"))


def groups(step):
    draw = rng.generator(step, "workers")
    made = []
    for index in range(2):
        rollouts = tuple(
            rollout(reward=reward, prompt=[1, 2], sampled=draw.integers(0, VOCAB, 3 + member).tolist(), logprob=-2.5)
            for member, reward in enumerate((0.0, 1.0, 1.0))
        )
        made.append(replace(group(index), rollouts=rollouts))
    return made


def steps(config, step, objective, numbers):
    recorded = []
    for number in numbers:
        batch = batch_of(groups(number), objective.current, producing=number + 1, token_budget=20)
        result = step.accumulate(batch)
        figures = step.apply(result, learning_rates=[config.optimizer.learning_rate]).figures
        recorded.append(figures | objective.observe(figures))
    return recorded


def weights(workers):
    each = (workers.passes.policy, workers.critic.worker, workers.passes.reference)
    return [array for worker in each for array in weights_of(worker).values()]


def commit(store, step, *, version, **fields):
    state = TrainingState(model_version=version, epoch=1, offsets={}, ledger={}, controller={}, **fields)
    policy = step.passes.policy
    captured = store.capture(state, layout=policy.weight_layout(), weights=policy.gather_weights(), parts=step.parts())
    return store.commit(captured)


def test_resumed_run_continues_policy_critic_and_reference_bit_exactly(config, tmp_path):
    recipe = objective_of(config)
    assert config.kl_control is not None
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=config.model.resolved)
    first = started(config, recipe, checkpoint=None)
    assert first.critic is not None and first.passes.reference is not None
    objective = AdaptiveObjective(recipe, controller=config.kl_control.controller)
    before = steps(config, first, objective, range(3))
    assert len({figures["kl_coefficient"] for figures in before}) == 3, "the controller must move"
    commit(store, first, version=3, kl_coefficient=objective.coefficient)
    undisturbed = steps(config, first, objective, range(3, 6)), weights(first)
    close_workers(first)

    latest = store.latest()
    again = started(config, recipe, checkpoint=latest[0])
    assert (again.passes.policy.model_version, again.passes.reference.model_version) == (3, 0)
    resumed = AdaptiveObjective(recipe, controller=config.kl_control.controller, restored=latest[1].kl_coefficient)
    figures = steps(config, again, resumed, range(3, 6))
    assert figures == undisturbed[0]
    for got, expected in zip(weights(again), undisturbed[1], strict=True):
        np.testing.assert_array_equal(got, expected)
    assert any(figure["kl_reference"] != figures[0]["kl_reference"] for figure in figures[1:])
    close_workers(again)


def test_every_trainer_setting_of_the_recipe_is_passed_to_the_trainer_backend():
    trainer = {"type": "torch", "precision": "bf16", "device": "cuda", "gradient_checkpointing": True}
    config = config_of(
        "torch",
        "/a/model",
        run={"seed": 3},
        model={"path": "/a/model", "head_precision": "fp32", "kernels": "batch_invariant"},
        trainer=trainer | {"options": {"mesh": 2}, "memory_share": 0.5},
        weights={"dtype": "bfloat16"},
        optimizer={"learning_rate": 0.01, "betas": [0.5, 0.6], "eps": 1e-3, "weight_decay": 0.7, "grad_clip": 0.8},
    )
    spec = spec_of(config, restore_from=Path("/a/state"))
    assert (spec.model_path, spec.seed, spec.precision) == (Path("/a/model"), 3, Precision.BF16)
    assert spec.optimizer == OptimizerSpec(betas=(0.5, 0.6), eps=1e-3, weight_decay=0.7, grad_clip=0.8)
    plain = TrainerSpec(model_path=Path("/plain"))
    same = {field.name for field in fields(TrainerSpec) if getattr(spec, field.name) == getattr(plain, field.name)}
    assert same == {"head"}, "which is not the recipe's to choose; what is new in the spec is missing above"


def test_critic_and_reference_start_only_if_the_objective_needs_them(tmp_path):
    BigramModel.random(VOCAB, seed=1).save(tmp_path / "model")
    plain = config_of("bigram", str(tmp_path / "model"), objective="grpo", critic=None, kl_control=None)
    workers = started(plain, objective_of(plain), checkpoint=None)
    assert (workers.critic, workers.passes.reference) == (None, None)


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"model": {"path": "/nope"}}, "^trainer: /nope"),
        ({"critic": {"path": "/nope"}}, "^critic: /nope"),
        ({"reference": {"path": "/nope"}}, "^reference: /nope"),
    ],
)
def test_error_for_a_missing_model_says_whether_trainer_critic_or_reference_needs_it(sections, sentence, tmp_path):
    BigramModel.random(VOCAB, seed=1).save(tmp_path / "model")
    config = config_of("bigram", str(tmp_path / "model"), **sections)
    with pytest.raises(ModelError, match=sentence):
        started(config, objective_of(config), checkpoint=None)


def saved(config, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=config.model.resolved)
    workers = started(config, objective_of(config), checkpoint=None)
    path = commit(store, workers, version=0)
    close_workers(workers)
    return path


def test_checkpoint_without_a_critic_is_rejected_if_the_objective_needs_one(config, tmp_path):
    kind, model = config.trainer.type, str(config.model.path)
    before = saved(config_of(kind, model, objective="grpo", critic=None, kl_control=None), tmp_path)
    with pytest.raises(RecipeError, match=rf"^objective: it needs a critic, and the checkpoint {before} has none"):
        started(config, objective_of(config), checkpoint=before)


@pytest.mark.parametrize("other", ["model", "type"])
def test_checkpoint_of_another_model_or_trainer_is_rejected(other, tmp_path):
    BigramModel.random(VOCAB, seed=1).save(tmp_path / "model")
    shape = DecoderShape(hidden=32, layers=2, heads=4, kv_heads=2, intermediate=48, vocab=VOCAB, max_positions=64)
    random_decoder(shape).save_pretrained(tmp_path / "decoder")
    BigramModel.random(VOCAB + 1, seed=1).save(tmp_path / "larger")
    before = saved(config_of("bigram", str(tmp_path / "model")), tmp_path)
    kind, name = ("bigram", "larger") if other == "model" else ("torch", "decoder")
    changed = config_of(kind, str(tmp_path / name))
    with pytest.raises(RecipeError, match=r"^trainer.type, model.path: the trainer's state in the checkpoint"):
        started(changed, objective_of(changed), checkpoint=before)


def in_flight(step, *, oldest):
    """Make groups for step `step`, whose rollouts have tokens of each version from `oldest` to `step`."""
    versions = range(oldest, step + 1)
    made = []
    for each in groups(step):
        rollouts = []
        for member, one in enumerate(each.rollouts):
            draw = rng.generator(step, "in flight", member)
            sampled = draw.integers(0, VOCAB, 2 * len(versions)).tolist()
            spans = [(version, 2) for version in versions]
            rollouts.append(rollout(reward=one.verdict.reward, sampled=sampled, spans=spans, logprob=-2.5))
        made.append(replace(each, rollouts=tuple(rollouts)))
    return made


def lockstep(config, step, numbers, *, k):
    """Take steps on rollouts with tokens of the last k versions; the weight history keeps those versions' weights."""
    objective, recorded = objective_of(config), []
    for number in numbers:
        step.will_sample(number, acceptance=k)
        batch = batch_of(
            in_flight(number, oldest=max(0, number + 1 - k)), objective, producing=number + 1, token_budget=40
        )
        result = step.accumulate(batch)
        figures = step.apply(result, learning_rates=[config.optimizer.learning_rate]).figures
        recorded.append(figures)
    return recorded


@pytest.fixture
def sampling(config):
    """Return a recipe for the same trainer that computes old log-probs with the weights that sampled each token."""
    return config_of(
        config.trainer.type,
        str(config.model.path),
        objective="decoupled_ppo",
        critic=None,
        kl_control=None,
        training={"old_logprobs": "sampling_weights"},
        staleness={"k": 8},
    )


def test_resumed_run_continues_bit_exactly_with_the_weight_history_of_its_checkpoint(sampling, tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=sampling.model.resolved)
    first = started(sampling, objective_of(sampling), checkpoint=None)
    lockstep(sampling, first, range(4), k=3)
    path = commit(store, first, version=4)
    assert [file.name for file in sorted((path / "history").iterdir())] == [
        f"version-{version:06d}.safetensors" for version in (1, 2, 3)
    ]
    undisturbed = lockstep(sampling, first, range(4, 8), k=3), weights_of(first.passes.policy)
    close_workers(first)

    again = started(sampling, objective_of(sampling), checkpoint=path, version=4)
    assert again.passes.history.versions == [1, 2, 3, 4]
    assert lockstep(sampling, again, range(4, 8), k=3) == undisturbed[0]
    for name, array in weights_of(again.passes.policy).items():
        np.testing.assert_array_equal(array, undisturbed[1][name])
    close_workers(again)


def test_run_resumed_without_weight_history_trains_only_on_samples_of_the_resumed_version(sampling, tmp_path):
    first = started(sampling, objective_of(sampling), checkpoint=None)
    lockstep(sampling, first, range(2), k=2)
    (tmp_path / "old" / "trainer").mkdir(parents=True)
    first.passes.policy.save_state(tmp_path / "old" / "trainer")
    again = started(sampling, objective_of(sampling), checkpoint=tmp_path / "old", version=2)
    assert again.passes.history.versions == [2]
    assert [again.can_train(group(0, version=version)) for version in (1, 2)] == [False, True]
