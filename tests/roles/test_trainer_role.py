"""The trainer's process builds its training loop, weight publisher and sample log from the recipe."""

from dataclasses import replace

import pytest
import torch

from pipelinerl.config.recipe import load
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import CheckpointError, RecipeError
from pipelinerl.models.tokenizer import decoder_of
from pipelinerl.roles.process import Identity
from pipelinerl.roles.trainer_role import publisher_of, samples_of
from pipelinerl.streams.memory_stream import MemoryStream
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.grace import Grace
from tests.fakes.checkpoints import model_directory, save, state_of


def test_trainer_whose_checkpoint_is_removed_while_it_starts_takes_the_newest_again(tmp_path):
    store = CheckpointStore(tmp_path / "checkpoints", keep=1, model_directory=model_directory(tmp_path / "model"))
    seen = []

    def start(path, version):
        assert path is not None
        seen.append(version)
        if len(seen) < 3:
            save(store, version + 1)  # the trainer that is alive continues, and keeps one checkpoint
            return (path / "trainer" / "optimizer").read_text()
        return "started"

    save(store, 1)
    assert store.start_from_newest(start) == (state_of(3), "started") and seen == [1, 2, 3]
    seen.clear()
    with pytest.raises(CheckpointError, match="step-000004 was removed while this trainer loaded it"):
        store.start_from_newest(start, attempts=2)

    def fail(_, __):
        raise RecipeError("trainer.type: the state belongs to others")

    with pytest.raises(RecipeError, match="belongs to others"):
        store.start_from_newest(fail)


def test_weight_publisher_follows_the_transport_in_the_recipe(tmp_path):
    def publisher(*changes):
        identity = Identity(run_dir=tmp_path, config=load("tiny", changes), name="role")
        return publisher_of(identity, EngineClient(), MemoryStream(), Grace())

    assert isinstance(publisher(), BroadcastPublisher)
    with pytest.raises(RecipeError, match="no parameter server is named"):
        publisher("weights.transport=pull")
    if not torch.cuda.is_available():
        with pytest.raises(RecipeError, match=r"weights.backend is nccl, which torch cannot use here; use gloo"):
            publisher("weights.backend=nccl")


def test_sample_log_gets_groups_per_step_and_seed_from_the_recipe_and_can_be_disabled(tmp_path):
    config = load("tiny", ["samples.max_bytes=2097152", "samples.groups_per_step=3", "run.seed=5"])
    identity = Identity(run_dir=tmp_path, config=config, name="role")
    samples = samples_of(identity)
    assert (samples.groups_per_step, samples.seed) == (3, 5)
    assert samples.decode([0, 1]) == decoder_of(config.model.resolved)([0, 1])
    samples.log.close()
    assert samples_of(replace(identity, config=load("tiny", ["samples.log=off"]))) is None


@pytest.mark.parametrize(
    ("overrides", "interval"),
    [([], 10), (["trainer.type=jax"], 0), (["trainer.type=jax", "figures.exact_entropy_interval=3"], 3)],
)
def test_entropy_is_measured_at_the_recipes_interval_or_at_the_default_for_the_trainer_type(overrides, interval):
    config = load("tiny", overrides)
    assert config.figures.interval(config.trainer.type) == interval
