"""Tests of recipes: bases, overrides, error messages, and that a saved recipe reads back equal."""

import math
import stat
from pathlib import Path

import pytest

from inference_contract.weights import OnUpdate
from pipelinerl.config import recipe as config
from pipelinerl.config.recipe import load, parse, save, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.objective.reward import NormalizationScope, RewardShaping
from trainer_contract.types import Precision

MINIMAL = {"model": {"path": "m"}, "domains": [{"name": "d", "source": "addition"}]}


def test_override_that_is_not_utf_8_is_rejected():
    with pytest.raises(RecipeError, match=r"^model.path: contains bytes that are not UTF-8, got 'a\\udcff'; rename"):
        load("tiny", ["model.path=a\udcff"])


def test_launcher_starts_parameter_servers_if_weights_are_pulled_and_the_recipe_names_no_server_urls():
    assert config.load("tiny").servers_to_start == 0
    pulled = ["weights.transport=pull", "parameter_server.replicas=3"]
    assert config.load("tiny", pulled).servers_to_start == 3
    assert config.load("tiny", [*pulled, "parameter_server.shards=2"]).servers_to_start == 6
    assert config.load("tiny", [*pulled, 'parameter_server.urls=["http://a:1"]']).servers_to_start == 0


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"a.toml": 'base = "b.toml"', "b.toml": 'base = "a.toml"'}, "a.toml: base refers back to this file"),
        ({"a.toml": 'base = "a.toml"'}, "a.toml: base refers back to this file"),
        ({"a.toml": 'base = "nope"'}, "recipe 'nope' is neither a file nor a shipped recipe; shipped are:"),
        ({"a.toml": "base = 3"}, "a.toml: base must be the text of a path, or the name of a shipped recipe, got 3"),
        ({"a.toml": "a = = 3"}, "a.toml: not valid TOML"),
        ({"a.toml": "\udcff"}, "a.toml: not valid TOML"),
        ({}, "is neither a file nor a shipped recipe"),
    ],
)
def test_files_that_are_not_recipes_are_rejected(tmp_path, files, sentence):
    for name, text in files.items():
        (tmp_path / name).write_text(text, errors="surrogateescape")
    with pytest.raises(RecipeError, match=sentence):
        load(tmp_path / "a.toml")


def test_override_strings_and_lists_become_typed_values():
    resolved = load("tiny", ["trainer.precision=bf16", "engine.on_update=abort", 'sampling.stop=["a", "b"]'])
    assert resolved.trainer.precision is Precision.BF16
    assert resolved.engine.on_update is OnUpdate.ABORT
    assert resolved.sampling.stop == ("a", "b")
    assert resolved.run.directory == Path("runs")


@pytest.mark.parametrize("recipe", sorted(config.RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipe_is_equal_after_save_and_load(recipe, tmp_path):
    resolved = load(recipe, ["staleness.k=inf"])
    written = tmp_path / "resolved.toml"
    save(resolved, written)
    again = load(written)
    assert stat.S_IMODE(written.stat().st_mode) == 0o600, "it may hold a secret"
    assert to_table(again) == to_table(resolved)
    assert again.staleness.bounds == resolved.staleness.bounds
    assert again.model_copy(update={"staleness": None}) == resolved.model_copy(update={"staleness": None})


def test_reward_shaping_settings_are_validated_and_unchanged_after_save_and_load():
    domain = {"name": "d", "source": "addition", "reward": {"mean": "group", "high": 5.0, "low": -math.inf}}
    resolved = parse({**MINIMAL, "domains": [domain]})
    assert resolved.domains[0].reward.shaping == RewardShaping(mean=NormalizationScope.GROUP, high=5.0)
    assert parse(to_table(resolved)).domains == resolved.domains
    with pytest.raises(RecipeError, match=r"^domains.d.reward: reward.low must not exceed high, got 2 and 1$"):
        parse({**MINIMAL, "domains": [{**domain, "reward": {"low": 2.0, "high": 1.0}}]})


@pytest.mark.parametrize(
    ("trainer", "processes"),
    [
        ({}, 1),
        ({"options": {"mesh": {"dp_shard": 2, "dp_replicate": 3}}}, 6),
        ({"options": {"mesh": {"dp_shard": 2}, "distributed": {"coordinator": "10.0.0.1:1"}}}, 1),
        ({"type": "jax", "options": {"mesh": {"fsdp": 2}}}, 1),
    ],
)
def test_launcher_starts_one_process_per_rank_of_a_torch_mesh(trainer, processes):
    config = parse({"model": {"path": "m"}, "domains": [{"name": "d", "source": "s"}], "trainer": trainer})
    assert config.trainer_processes == processes
    alone = config.in_one_process
    assert alone.trainer_processes == 1
    assert alone.trainer.options == ({} if config.trainer.type == "torch" else trainer["options"])
