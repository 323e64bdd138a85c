"""Recipe tables: what they select, and the sentence a mistake gets."""

import math

import pytest

from pipelinerl.errors import RecipeError
from pipelinerl.objective import adv, grad1, grad2, is_weight
from pipelinerl.objective.presets import PRESETS, resolve, to_table
from pipelinerl.objective.tokens import Policy


def test_a_name_an_empty_table_and_a_preset_key():
    assert resolve("grpo") == PRESETS["grpo"] == resolve({"preset": "grpo"})
    assert resolve({}) == PRESETS["pipelinerl"]


def test_slots_can_be_adjusted_and_replaced():
    objective = resolve(
        {
            "preset": "grpo",
            "grad1": {"epsilon_high": 0.28, "over": "old"},
            "grad2": {"kind": "kl", "beta": 1},
            "is_weight": {"kind": "token_ratio", "high": math.inf},
            "adv": {"scale": "none"},
        }
    )
    assert objective.grad1 == grad1.ClippedRatio(epsilon_low=0.2, epsilon_high=0.28, over=Policy.OLD)
    assert objective.grad2 == grad2.KLPenalty(beta=1.0)
    assert objective.is_weight == is_weight.TokenRatio()
    assert objective.adv == adv.GroupRelative(scale=adv.Scale.NONE)
    assert objective.agg == PRESETS["grpo"].agg
    assert objective.needs == {"old_logprobs", "ref_logprobs"}
    assert resolve({"grad1": "clipped_ratio"}).grad1 == grad1.ClippedRatio()


@pytest.mark.parametrize("name", PRESETS)
def test_the_full_table_resolves_to_the_same_objective(name):
    assert resolve(to_table(PRESETS[name])) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_no_preset_costs_a_forward_pass(name):
    assert PRESETS[name].needs == frozenset()


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ("gpro", "objective.preset must be one of grpo, pipelinerl, .*; got 'gpro'"),
        ({"grad3": {}}, "objective.grad3 is unknown; expected one of preset, agg, is_weight, adv, grad1, grad2"),
        (
            {"preset": "grpo", "grad1": {"epsilon": 0.2}},
            "objective.grad1.epsilon is unknown; expected one of kind, eps",
        ),
        ({"grad1": {"kind": "ppo"}}, "objective.grad1.kind must be one of logprob, clipped_ratio; got 'ppo'"),
        ({"grad2": "kl3"}, "objective.grad2.kind must be one of none, kl; got 'kl3'"),
        ({"grad2": {"kind": "kl", "beta": "0.1"}}, "objective.grad2.beta must be a number, got '0.1'"),
        ({"grad2": {"kind": "kl", "beta": True}}, "objective.grad2.beta must be a number, got True"),
        ({"grad2": {"kind": "kl", "beta": math.nan}}, "objective.grad2.beta must be a number, got nan"),
        ({"grad2": {"kind": "kl", "beta": -1}}, "objective.grad2.beta must not be negative, got -1"),
        ({"adv": {"scale": "variance"}}, "objective.adv.scale must be one of none, std; got 'variance'"),
        ({"agg": 3}, "objective.agg must be the name of a kind or a table, got 3"),
    ],
)
def test_a_mistake_is_named_with_its_path(table, sentence):
    with pytest.raises(RecipeError, match=f"^{sentence}"):
        resolve(table)
