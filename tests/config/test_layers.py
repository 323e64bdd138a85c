"""What a change leaves of the layers below it: a choice made anew is made whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.layers import merged, overridden
from pipelinerl.config.recipe import load
from pipelinerl.errors import RecipeError
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.presets import resolve

BASE = {"preset": "pipelinerl", "is_weight": "one", "grad1": {"kind": "clipped_ratio", "epsilon_high": 0.28}}


def objective(*overrides: str) -> object:
    return overridden({"objective": BASE, "run": {"name": "x"}}, overrides)["objective"]


@pytest.mark.parametrize("override", ["objective.preset=ppo_tis", "objective=ppo_tis", 'objective={preset="ppo_tis"}'])
def test_a_preset_over_a_recipe_that_sets_slots_replaces_them(override: str) -> None:
    """It used to keep them: `tiny` with ppo_tis ran without TIS."""
    assert objective(override) == {"preset": "ppo_tis"}
    assert resolve(load("tiny", [override]).objective) == PRESETS["ppo_tis"].objective


@pytest.mark.parametrize(
    "overrides",
    [
        ("objective.preset=ppo_tis", "objective.is_weight.high=4.0"),
        ("objective.is_weight.high=4.0", "objective.preset=ppo_tis"),
        ("objective.is_weight.high=4.0", "objective=ppo_tis"),
        ("objective=ppo_tis", "objective.is_weight.high=4.0"),
    ],
)
def test_what_stands_beside_the_preset_refines_it_in_any_order(overrides: tuple[str, ...]) -> None:
    assert objective(*overrides) == {"preset": "ppo_tis", "is_weight": {"high": 4.0}}


def test_a_slot_without_a_preset_changes_the_recipe_below() -> None:
    assert objective("objective.grad1.over=old") == BASE | {"grad1": {**BASE["grad1"], "over": "old"}}  # type: ignore[dict-item]
    assert objective("objective.is_weight.high=3.0") == BASE | {"is_weight": {"kind": "one", "high": 3.0}}


def test_a_kind_replaces_what_was_said_of_the_slot() -> None:
    """`epsilon_high` is a clipped ratio's, and used to be handed on to whatever kind was named."""
    assert objective("objective.grad1.kind=sequence_ratio") == BASE | {"grad1": {"kind": "sequence_ratio"}}
    assert objective("objective.grad1=logprob") == BASE | {"grad1": {"kind": "logprob"}}


def test_a_derived_recipe_does_as_an_override_does(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "tiny"\n[objective]\npreset = "ppo_tis"\n')
    assert resolve(load(recipe).objective) == PRESETS["ppo_tis"].objective
    recipe.write_text('base = "tiny"\nobjective = "ppo_tis"\n')
    assert resolve(load(recipe).objective) == PRESETS["ppo_tis"].objective
    recipe.write_text('base = "tiny"\n[objective]\npreset = "grpo"\ngrad1.epsilon_high = 0.3\n')
    assert load(recipe).objective == {"preset": "grpo", "grad1": {"epsilon_high": 0.3}}
    recipe.write_text('base = "tiny"\n[objective]\ngrad1.over = "old"\n')
    tiny = load("tiny").objective
    assert isinstance(tiny, dict)
    assert load(recipe).objective == tiny | {"grad1": {**tiny["grad1"], "over": "old"}}


def test_a_base_that_is_a_name_can_be_changed() -> None:
    assert merged({"objective": "grpo"}, {"objective": {"adv": {"scale": "none"}}}) == {
        "objective": {"preset": "grpo", "adv": {"scale": "none"}}
    }
    assert overridden({"objective": "grpo"}, ["objective.adv.scale=none"]) == {
        "objective": {"preset": "grpo", "adv": {"scale": "none"}}
    }


def test_other_tables_are_merged_as_ever_and_the_layers_stay_what_they_were() -> None:
    below = {"run": {"name": "x", "steps": 3}, "engine": {"slots": 1}}
    assert merged(below, {"run": {"steps": 4}}) == {"run": {"name": "x", "steps": 4}, "engine": {"slots": 1}}
    assert overridden(below, ["run.steps=5", "run.seed=1"])["run"] == {"name": "x", "steps": 5, "seed": 1}
    assert below == {"run": {"name": "x", "steps": 3}, "engine": {"slots": 1}}
    with pytest.raises(RecipeError, match=r"run\.name\.x: name is not a table"):
        overridden(below, ["run.name.x=1"])


def test_one_of_a_list_of_tables_is_meant_by_its_name() -> None:
    """The README says that any key can be overridden; those of domains could not."""
    below = {"domains": [{"name": "a"}, {"name": "b", "parameters": {"path": "x"}}]}
    changed = overridden(below, ["domains.b.parameters.path=y", "domains.a.weight=0.5"])
    assert changed == {"domains": [{"name": "a", "weight": 0.5}, {"name": "b", "parameters": {"path": "y"}}]}
    assert below["domains"][0] == {"name": "a"}, "the layer below stays what it was"
