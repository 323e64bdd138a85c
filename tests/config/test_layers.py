"""Tests of recipe layers (base, recipe, overrides): a new preset or kind discards the settings of lower layers."""

import pytest

from pipelinerl.config.layers import merged, overridden, resolved_beside
from pipelinerl.config.recipe import load, save
from pipelinerl.enums import Overdue
from pipelinerl.errors import RecipeError
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.presets import resolve
from pipelinerl.staleness import StalenessBounds

BASE = {"preset": "pipelinerl", "is_weight": "one", "grad1": {"kind": "clipped_ratio", "epsilon_high": 0.28}}


def objective(*overrides):
    return overridden({"objective": BASE, "run": {"name": "x"}}, overrides)["objective"]


@pytest.mark.parametrize("override", ["objective.preset=ppo_tis", "objective=ppo_tis", 'objective={preset="ppo_tis"}'])
def test_override_that_names_an_objective_preset_discards_the_base_recipes_objective_settings(override):
    """If the objective settings of `tiny` were kept, the preset ppo_tis would run without TIS."""
    assert objective(override) == {"preset": "ppo_tis"}
    assert resolve(load("tiny", [override]).objective) == PRESETS["ppo_tis"].objective
    high, both = "objective.is_weight.high=4.0", {"preset": "ppo_tis", "is_weight": {"high": 4.0}}
    if "{" not in override:  # such a table replaces what was given before it
        assert objective(high, override) == objective(override, high) == both, "in any order"


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        ("grad1.over=old", {"grad1": {**BASE["grad1"], "over": "old"}}),
        ("is_weight.high=3.0", {"is_weight": {"kind": "one", "high": 3.0}}),
        ("grad1.kind=sequence_ratio", {"grad1": {"kind": "sequence_ratio"}}),
        ("grad1=logprob", {"grad1": {"kind": "logprob"}}),
    ],
)
def test_override_of_one_objective_setting_keeps_the_others_unless_it_names_another_kind_of_term(override, changed):
    assert objective(f"objective.{override}") == BASE | changed


def test_derived_recipe_is_merged_into_its_base_by_the_same_rules_as_overrides(tmp_path):
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


def test_tables_are_merged_key_by_key_and_input_layers_stay_unchanged():
    below = {"run": {"name": "x", "steps": 3}, "engine": {"slots": 1}}
    assert merged(below, {"run": {"steps": 4}}) == {"run": {"name": "x", "steps": 4}, "engine": {"slots": 1}}
    assert overridden(below, ["run.steps=5", "run.seed=1"])["run"] == {"name": "x", "steps": 5, "seed": 1}
    assert below == {"run": {"name": "x", "steps": 3}, "engine": {"slots": 1}}
    with pytest.raises(RecipeError, match=r"run\.name\.x: name is not a table"):
        overridden(below, ["run.name.x=1"])


def test_override_selects_a_domain_by_its_name():
    below = {"domains": [{"name": "a"}, {"name": "b", "parameters": {"path": "x"}}]}
    changed = overridden(below, ["domains.b.parameters.path=y", "domains.a.weight=0.5"])
    assert changed == {"domains": [{"name": "a", "weight": 0.5}, {"name": "b", "parameters": {"path": "y"}}]}
    assert below["domains"][0] == {"name": "a"}, "the layer below stays what it was"


DOMAIN = '[[domains]]\nname = "d"\nsource = "{source}"\nverifier = "{verifier}"\n'


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_path_is_relative_to_the_recipe_file_that_contains_it_or_to_the_working_directory(tmp_path, monkeypatch):
    command = 'command = ["python3", "cli.py", "{task}", "--quiet"]\n'
    domain = DOMAIN.format(source="../data.py:rows", verifier="rewards.py:score") + command
    write(tmp_path / "bases" / "cli.py", "")
    write(tmp_path / "bases" / "base.toml", f'base = "tiny"\n{domain}[trainer]\ntype = "mine.py:Trainer"\n')
    own = '[engine]\ntype = "mine.py:open"\n[elastic.types."mine.py:open"]\nmax = 3\n[elastic.types.torch]\nmax = 2\n'
    recipe = write(tmp_path / "run.toml", f'base = "bases/base.toml"\n{own}')
    monkeypatch.chdir(write(tmp_path / "elsewhere" / "x", "").parent)
    config = load(recipe)
    assert config.domains[0].verifier == f"{tmp_path}/bases/rewards.py:score"
    assert config.domains[0].source == f"{tmp_path}/data.py:rows"
    assert config.domains[0].command == ("python3", f"{tmp_path}/bases/cli.py", "{task}", "--quiet")
    assert config.trainer.type == f"{tmp_path}/bases/mine.py:Trainer"
    assert list(config.elastic.types) == [config.engine.type, "torch"] == [f"{tmp_path}/mine.py:open", "torch"]
    block = '[{ name = "d", source = "files", parameters = { path = "mine/*.jsonl" } }]'
    changed = load("tiny", ["engine.type=own.py:open", f"domains={block}"])
    assert changed.engine.type == f"{tmp_path}/elsewhere/own.py:open"
    assert changed.domains[0].parameters == {"path": f"{tmp_path}/elsewhere/mine/*.jsonl"}


def test_saved_recipe_loads_equal_from_another_directory(tmp_path, monkeypatch):
    rewards = 'rewards = [{ function = "r.py:form", weight = 0.2 }, { function = "math_answer" }]'
    domain = f'[[domains]]\nname = "d"\nsource = "addition"\n{rewards}\ncorrect_at = 0.5'
    config = load(write(tmp_path / "run.toml", f'base = "tiny"\n{domain}'))
    (tmp_path / "runs").mkdir()
    save(config, tmp_path / "runs" / "one.toml")
    monkeypatch.chdir("/")
    again = load(tmp_path / "runs" / "one.toml")
    assert again == config
    assert [part.function for part in again.domains[0].rewards] == [f"{tmp_path}/r.py:form", "math_answer"]
    assert [part.shown_as for part in again.domains[0].rewards] == ["form", "math_answer"]


def test_resolving_relative_paths_keeps_recipe_values_that_only_look_like_relative_paths(tmp_path):
    table = {
        "engine": {"type": "torch", "options": {"function": "x.py:y"}},
        "domains": [{"name": "x.py:y", "source": "reasoning_gym:chain_sum", "parameters": {"source": "x.py:y"}}],
    }
    assert resolved_beside(table, tmp_path) == table
    for other in ({"verifier": "package.module:attribute"}, {"verifier": "/abs/x.py:y"}):
        assert resolved_beside(other, tmp_path) == other


def test_staleness_mode_replaces_j_and_k_of_lower_layers_only(tmp_path):
    assert load("tiny").staleness.k == 2
    assert load("tiny", ["staleness.mode=on_policy"]).staleness.bounds == StalenessBounds(1, 1)
    auto = load("tiny", ["staleness.k=8", "staleness.mode=auto", "staleness.overdue=wait"]).staleness
    assert (auto.auto_j, auto.bounds.k, auto.overdue) == (True, 8, Overdue.WAIT)
    recipe = tmp_path / "mine.toml"
    recipe.write_text('base = "tiny"\n[staleness]\nmode = "rlax"\nk = 20\n')
    assert load(str(recipe)).staleness.bounds == StalenessBounds(16, 20)
