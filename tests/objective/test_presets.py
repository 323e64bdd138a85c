"""The `objective` table of a recipe selects the stated objective; mistakes in the table are reported."""

import math
import tomllib
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.enums import NoSignal
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.objective import adv, agg, grad1, grad2, is_weight
from pipelinerl.objective.catalogue import PRESETS
from pipelinerl.objective.presets import no_signal_of, resolve, to_table
from pipelinerl.objective.tokens import Policy


def test_recipe_gives_the_objective_as_a_preset_name_or_a_table_and_an_empty_table_means_the_default():
    assert resolve("grpo") == PRESETS["grpo"].objective == resolve({"preset": "grpo"})
    assert resolve({}) == PRESETS["pipelinerl"].objective


def test_example_objective_in_the_docs_builds_the_objective_that_the_docs_describe():
    text = (Path(__file__).parents[2] / "docs" / "understand" / "objectives.md").read_text()
    table = tomllib.loads(text.split("```toml")[1].split("```")[0])
    objective = resolve(table["objective"])
    assert objective.is_weight == is_weight.TokenRatio(numerator=Policy.OLD, high=2.0)
    assert objective.needs == {"old_logprobs", "ref_logprobs"}


def test_recipe_can_change_or_replace_parts_of_an_objective_preset():
    objective = resolve(
        {
            "preset": "grpo",
            "grad1": {"epsilon_high": 0.28, "over": "old"},
            "grad2": {"kind": "kl", "beta": 1},
            "is_weight": {"kind": "token_ratio", "high": math.inf, "numerator": "old"},
            "adv": {"scale": "none"},
        }
    )
    assert objective.grad1 == grad1.ClippedRatio(epsilon_low=0.2, epsilon_high=0.28, over=Policy.OLD)
    assert objective.grad2 == grad2.KLPenalty(beta=1.0)
    assert objective.is_weight == is_weight.TokenRatio(numerator=Policy.OLD)
    assert objective.adv == adv.GroupRelative(scale=adv.Scale.NONE)
    assert objective.agg == PRESETS["grpo"].objective.agg
    assert objective.needs == {"old_logprobs", "ref_logprobs"}
    assert resolve({"grad1": "clipped_ratio", "is_weight": "one"}).grad1 == grad1.ClippedRatio()


def test_table_of_objectives_in_the_docs_lists_exactly_the_presets():
    text = (Path(__file__).parents[2] / "docs" / "understand" / "objectives.md").read_text()
    rows = text.split("## Algorithms")[1].split("\n## ")[0].splitlines()
    assert [row.split("`")[1] for row in rows if row.startswith("| `")] == list(PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_objective_preset_written_as_a_table_is_read_as_the_same_objective(name):
    assert resolve(to_table(PRESETS[name].objective)) == PRESETS[name].objective


@pytest.mark.parametrize("name", ["reinforce_token", "dr_grpo", "agarwal", "dppo_tv"])
def test_preset_that_divides_by_max_tokens_takes_max_tokens_from_the_run(name):
    assert resolve(name).agg == agg.Sequences(length=agg.Length.MAX_TOKENS)
    assert resolve(name, max_tokens=8).agg == agg.Sequences(length=8.0)
    assert resolve({"preset": name, "agg": {"length": 256}}, max_tokens=8).agg == agg.Sequences(length=256.0)
    assert resolve({"agg": {"kind": "sequences", "length": "max_tokens"}}, max_tokens=9).agg.length == 9.0
    one = np.ones(1, int)
    with pytest.raises(UserError, match=r"agg\.length is max_tokens, .* which is unknown here; give max_tokens"):
        resolve(name).agg.token_weights(lengths=one, groups=one, valid=one.astype(bool))


def test_only_the_dapo_preset_filters_groups_whose_rollouts_all_have_the_same_reward():
    assert {name for name, preset in PRESETS.items() if preset.no_signal is NoSignal.FILTER} == {"dapo"}
    assert no_signal_of({"preset": "dapo", "grad1": {"epsilon_high": 0.3}}) is NoSignal.FILTER
    assert no_signal_of("grpo") is no_signal_of({}) is NoSignal.TRAIN
    with pytest.raises(RecipeError, match=r"objective\.preset must be one of"):
        no_signal_of("dpo")


@pytest.mark.parametrize("name", PRESETS)
def test_objective_preset_has_a_source_a_note_of_its_extra_passes_and_a_formula_for_each_part(name):
    preset = PRESETS[name]
    assert ("Needs" in preset.note) == bool(preset.objective.passes)
    assert any(character.isdigit() for character in preset.source)
    slots = (preset.objective.agg, preset.objective.is_weight, preset.objective.adv, preset.objective.grad1)
    assert all(slot.formula for slot in (*slots, preset.objective.grad2))
