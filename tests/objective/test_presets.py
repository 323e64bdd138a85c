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


def test_table_of_objectives_in_the_docs_lists_exactly_the_presets() -> None:
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


RECOMPUTED = {"old_logprobs"}
PASSES = {
    "ppo": {"values"},
    "grpo_kl": {"ref_logprobs"},
    "reinforce_plus_plus": {"ref_logprobs"},
    "decoupled_ppo": RECOMPUTED,
    "ppo_recomputed": RECOMPUTED,
    "ppo_tis": RECOMPUTED,
    "ppo_vanilla_is": RECOMPUTED,
    "icepop": RECOMPUTED,
    "clip_cov": RECOMPUTED,
    "kl_cov": RECOMPUTED,
    "deepseek_v32": {"ref_logprobs"},
    "sao": {"values"},
    "on_policy_distillation": {"ref_logprobs"},
}


@pytest.mark.parametrize("name", PRESETS)
def test_note_of_an_objective_preset_mentions_extra_forward_passes_exactly_if_it_needs_them(name):
    preset = PRESETS[name]
    assert preset.objective.passes == PASSES.get(name, set())
    assert ("Needs" in preset.note) == (name in PASSES)


def test_columns_that_only_the_advantages_read_are_in_the_objectives_passes_and_not_in_its_needs():
    """`needs` names the columns that `evaluate` reads in the trainer; `passes` adds those of the advantages."""
    objective = resolve({"preset": "ppo", "adv": {"kl": 0.1}, "grad2": "kl"})
    assert objective.needs == {"ref_logprobs"}
    assert objective.passes == {"values", "old_logprobs", "ref_logprobs"}


def test_only_the_dapo_preset_filters_groups_whose_rollouts_all_have_the_same_reward():
    assert {name for name, preset in PRESETS.items() if preset.no_signal is NoSignal.FILTER} == {"dapo"}
    assert no_signal_of({"preset": "dapo", "grad1": {"epsilon_high": 0.3}}) is NoSignal.FILTER
    assert no_signal_of("grpo") is no_signal_of({}) is NoSignal.TRAIN
    with pytest.raises(RecipeError, match=r"objective\.preset must be one of"):
        no_signal_of("dpo")


@pytest.mark.parametrize("name", PRESETS)
def test_each_objective_preset_has_a_source_and_each_of_its_parts_has_a_formula(name):
    preset = PRESETS[name]
    assert any(character.isdigit() for character in preset.source)
    slots = (preset.objective.agg, preset.objective.is_weight, preset.objective.adv, preset.objective.grad1)
    assert all(slot.formula for slot in (*slots, preset.objective.grad2))


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"preset": "gspo", "agg": "batch"}, "agg must be trajectory with a ratio of whole sequences"),
        ({"preset": "gmpo", "agg": "sequences"}, "agg must be trajectory with a ratio of whole sequences"),
        ({"preset": "gspo", "adv": "gae"}, "adv must give a sequence one advantage"),
        ({"preset": "gspo", "adv": {"kind": "reward_to_go", "kl": 0.1}}, "adv must give a sequence one advantage"),
        ({"preset": "grpo", "is_weight": "token_ratio"}, "is_weight.numerator must not be current with a ratio"),
        ({"preset": "grpo", "is_weight": {"kind": "topr"}}, "is_weight.numerator must not be current with"),
        (
            {"preset": "grpo", "is_weight": {"kind": "token_ratio", "numerator": "old"}},
            "is_weight.denominator must not be behavior with a ratio over behavior",
        ),
        ({"is_weight": {"numerator": "behavior"}}, "is_weight divides behavior by itself"),
        ({"is_weight": {"low": 2, "high": 1}}, "is_weight.low must not exceed high, got 2.0 and 1.0"),
        ({"preset": "grpo", "grad1": {"over": "current"}}, "grad1.over must not be current"),
        ({"preset": "gfpo", "adv": {"keep": 1}}, "adv.keep must be at least 2, got 1"),
        ({"preset": "gfpo", "adv": {"keep": 2.5}}, "adv.keep must be a whole number, got 2.5"),
        ({"preset": "rae", "adv": {"decay": 1.0}}, "adv.decay must be below 1, got 1.0"),
        ({"preset": "clip_cov", "adv": {"low": 6.0}}, "adv.low must not exceed high, got 6.0 and 5.0"),
        ({"preset": "gspo", "adv": "covariance_clipped"}, "adv must give a sequence one advantage"),
        ({"preset": "gspo", "adv": "role_baseline"}, "adv must give a sequence one advantage"),
        ({"preset": "ppo", "adv": {"discount": 1.5}}, "adv.discount must be at most 1, got 1.5"),
        ({"preset": "ppo", "adv": {"trace": 1.5}}, "adv.trace must be at most 1, got 1.5"),
        ({"agg": {"length": 0}}, "agg.length must be positive, got 0.0"),
        ({"adv": {"kind": "constant", "value": 0}}, "adv.value must not be 0 with grad2 none"),
        ({"grad2": {"kind": "kl", "to": "current"}}, "grad2.to must not be current"),
        ({"grad2": {"kind": "kl", "estimator": "k3_weighted", "over": "current"}}, "grad2.over must not be current"),
        ({"preset": "cfpo", "grad1": {"epsilon": 0}}, "grad1.epsilon must be positive"),
        ({"preset": "sapo", "grad1": {"negative": 0}}, "grad1.positive and grad1.negative must be positive"),
        ({"preset": "sapo", "is_weight": "gamma"}, "is_weight.numerator must not be current with a ratio"),
        ({"preset": "luspo", "adv": {"credit": "turns"}}, "adv.credit must be episode with a ratio of whole"),
    ],
)
def test_contradictory_objective_settings_are_rejected(table, sentence):
    with pytest.raises(RecipeError, match=f"^objective.{sentence}"):
        resolve(table)


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("gpro", "objective.preset must be one of reinforce, .*grpo, .*; got 'gpro'"),
        ({"grad3": {}}, "objective.grad3 is unknown; expected one of preset, agg, is_weight, adv, grad1, grad2"),
        (
            {"preset": "grpo", "grad1": {"epsilon": 0.2}},
            "objective.grad1.epsilon is unknown; expected one of kind, eps",
        ),
        ({"grad1": {"kind": "ppo"}}, "objective.grad1.kind must be one of logprob, clipped_ratio, .*; got 'ppo'"),
        (
            {"grad2": "kl3"},
            "objective.grad2.kind must be one of none, kl, kl_cov, entropy, exact_entropy, log_barrier; got 'kl3'",
        ),
        ({"grad2": {"kind": "kl", "beta": "0.1"}}, "objective.grad2.beta must be a number, got '0.1'"),
        ({"grad2": {"kind": "kl", "beta": True}}, "objective.grad2.beta must be a number, got True"),
        ({"grad2": {"kind": "kl", "beta": math.nan}}, "objective.grad2.beta must be a number, got nan"),
        ({"grad2": {"kind": "kl", "beta": -1}}, "objective.grad2.beta must not be negative, got -1"),
        ({"adv": {"scale": "variance"}}, "objective.adv.scale must be one of none, std, mean, batch; got 'variance'"),
        (
            {"preset": "dr_grpo", "agg": {"length": "longest"}},
            "objective.agg.length must be one of max_tokens; got 'longest'",
        ),
        ({"agg": {"length": True}}, "objective.agg.length must be a number, got True"),
        ({"agg": 3}, "objective.agg must be the name of a kind or a table, got 3"),
    ],
)
def test_invalid_key_in_the_objective_table_is_reported_with_its_full_path(table, sentence):
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        resolve(table)
