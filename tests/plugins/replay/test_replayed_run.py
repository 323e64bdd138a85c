"""`pipelinerl replay`: the checkpoint that it starts from, and objectives that it rejects."""

import pytest
from rich.console import Console

from pipelinerl.config.recipe import load, save as save_recipe, write_layout
from pipelinerl.errors import UserError
from pipelinerl.plugins.replay.replayed_run import _checkpoint_before, show
from pipelinerl.roles.wiring import checkpoints_of
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from tests.fakes.checkpoints import model_directory, save


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
