"""Tests of a recipe's evaluation sets, and of the defaults from `[evaluation]`."""

import re

import pytest

from pipelinerl.config.layers import overridden
from pipelinerl.config.recipe import load, parse, to_table
from pipelinerl.errors import RecipeError
from pipelinerl.roles.new_controller import settings_of
from pipelinerl.roles.problems import held_out_problems, training_problems
from pipelinerl.roles.wiring import knobs_of

DOMAINS = [
    {"name": "a", "source": "addition", "weight": 1.0},
    {"name": "b", "source": "addition", "weight": 3.0, "parameters": {"max_digits": 3}},
    {"name": "benchmark", "source": "addition", "weight": 0.0, "parameters": {"max_digits": 4}},
]


def recipe(*sets, overrides=()):
    table = to_table(load("tiny")) | {"domains": DOMAINS, "evaluations": list(sets)}
    return parse(overridden(table, overrides))


def test_recipe_without_evaluation_sets_gets_an_evaluation_set_named_after_its_split():
    changed = ("evaluation.problems=7", "evaluation.samples=2", "evaluation.temperature=1")
    (only,) = recipe(overrides=changed).evaluation_sets
    assert (only.name, only.domains, only.problems, only.samples) == ("held_out", ("a", "b"), 7, 2)
    (only,) = recipe(overrides=("evaluation.split=validation",)).evaluation_sets
    assert (only.name, only.split, only.interval_steps) == ("validation", "validation", None)


def test_evaluation_set_can_override_each_setting_of_the_evaluation_section_separately():
    often = {"interval_steps": 200, "samples": 4, "temperature": 1.0, "pass_at": [4]}
    sets = ({"name": "quick", "problems": 8}, {"name": "hard", "domains": ["benchmark"], **often})
    config = recipe(*sets, overrides=("evaluation.problems=30", "evaluation.max_tokens=9"))
    quick, hard = config.evaluation_sets
    assert (quick.problems, quick.samples, quick.interval_steps, quick.place) == (8, 1, None, 0)
    assert (hard.problems, hard.samples, hard.interval_steps, hard.place) == (30, 4, 200, 1)
    assert (hard.domains, hard.max_tokens, hard.pass_at) == (("benchmark",), 9, (4,))
    assert settings_of(config).evaluation.sets == (quick, hard)


def test_domain_with_zero_weight_is_evaluated_but_not_trained_on():
    config = recipe(
        {"name": "main"}, {"name": "bench", "domains": ["benchmark"]}, {"name": "both", "domains": ["b", "benchmark"]}
    )
    training = training_problems(config)
    assert {training.problem(index).domain for index in range(64)} == {"a", "b"}
    assert list(knobs_of(config).domain_weights) == ["a", "b"], "no knob makes it one to train on"
    held_out = held_out_problems(config)
    drawn = {name: [mixture.problem(index).domain for index in range(40)] for name, mixture in held_out.items()}
    assert set(drawn["main"]) == {"a", "b"} and set(drawn["bench"]) == {"benchmark"}
    assert 29 <= drawn["both"].count("b") <= 31, "3 to 1: in its sets a domain without weight has that of 1"


def test_problems_of_an_evaluation_set_do_not_depend_on_other_sets():
    alone = held_out_problems(recipe({"name": "main", "domains": ["b"]}))["main"]
    joint = held_out_problems(recipe({"name": "x", "split": "validation"}, {"name": "main", "domains": ["b"]}))["main"]
    assert [alone.problem(index) for index in range(9)] == [joint.problem(index) for index in range(9)]


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        ([{"name": "x"}, {"name": "x"}], "evaluations must have unique names, got x, x"),
        ([{"name": "x", "domains": ["c"]}], "evaluations.x.domains names c; domains are a, b, benchmark"),
        ([{"name": "x", "samples": 2}], "evaluations.x.samples (2) of one problem are all the same"),
        ([{"name": "x", "pass_at": [2]}], "evaluations.x.pass_at names 2, but pass@k can be estimated only from"),
        ([{"name": "x", "temperature": 1e-7}], "evaluations.x.temperature must be 0 or at least 1e-05"),
        ([{"name": "x", "max_tokens": 32}], "evaluations.x.max_tokens (32) must be below engine.context_length (32)"),
        ([{"name": "x", "pin": "gate"}], "evaluations.x.pin: unknown key"),
        ([{"problems": 3}], "evaluations.0.name: must be given"),
        ([{"name": "a b"}], "evaluations.0.name: String should match pattern"),
    ],
)
def test_invalid_evaluation_sets_are_rejected(sets, sentence):
    with pytest.raises(RecipeError, match=re.escape(sentence)):
        recipe(*sets)
