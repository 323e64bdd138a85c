"""Tests of knobs (settings that can be changed during a run): valid patches, and the JSON form."""

import math

import pytest

from pipelinerl.errors import RecipeError
from tests.controller.world import knobs


def test_knob_values_may_be_given_as_text():
    """The command line sends text, HTTP clients send numbers."""
    given = {"j": "2", "k": "inf", "temperature": "0.5", "rollouts_per_step": "8"}
    assert knobs().patched(given) == knobs(j=2, k=math.inf, temperature=0.5, rollouts_per_step=8)
    assert type(knobs().patched({"j": "2"}).j) is int


def test_patch_that_contains_the_current_knobs_as_json_is_valid_and_changes_nothing():
    for some in (knobs(), knobs(k=math.inf), knobs(j=3, k=7)):
        shown = some.to_json()
        assert "group_sizes" not in shown and "max_groups" not in shown and "k_finite" not in shown
        assert some.patched(shown) == some


def test_staleness_modes_and_an_infinite_or_chosen_bound_are_accepted():
    assert knobs().patched({"mode": "rlax"}) == knobs(j=16, k=32)
    assert knobs().patched({"mode": "auto"}).to_json()["j"] == "auto"
    assert knobs(j=None).patched({"j": 2}).j == 2
    assert knobs(j=2).patched({"j": "auto"}).j is None
    assert knobs().patched({"k": "inf"}).to_json()["k"] == "inf"
    assert knobs(k_finite=True).patched({"k": 400}).k == 400
    assert knobs(j=1, k=4).patched({"j": 6, "k": 9}) == knobs(j=6, k=9)


def test_domain_weights_can_be_patched_individually_or_as_a_table():
    base = knobs(domain_weights={"math": 1.0, "code": 2.0})
    assert base.patched({"domain_weights.code": "5"}).domain_weights == {"math": 1.0, "code": 5.0}
    both = base.patched({"domain_weights": {"math": 0}, "domain_weights.code": 3})
    assert both.domain_weights == {"math": 0.0, "code": 3.0}


LIMITS = {"engines_min": {"bigram": 1}, "engines_max": {"bigram": 6}}
MIXED = {"group_sizes": {"a": 16, "b": 6}, "rollouts_per_step": 17}


@pytest.mark.parametrize(
    ("change", "sentence", "before"),
    [
        ({"domain_weights.chess": 1}, "unknown domain 'chess'; domains are a, b", {}),
        ({"domain_weights.a": "much"}, "domain_weights.a must be a number, got 'much'", {}),
        ({"domain_weights.a": -1}, "domain_weights.a must not be negative, got -1", {}),
        ({"domain_weights": {"a": 0, "b": 0}}, "the sum of domain_weights must be a positive number", {}),
        ({"domain_weights": 3}, "domain_weights must be a table of numbers by domain, got 3", {}),
        ({"domain_weights.a": 10**30}, "the sum of domain_weights must be at most 2147483647, got 1e+30", {}),
        ({"groups_in_flight": 0}, "groups_in_flight must be a positive number", {}),
        ({"groups_in_flight": 2**31}, "groups_in_flight must be at most 2147483647, got 2.14748e+09", {}),
        ({"evaluation_interval_steps": 1e20}, "evaluation_interval_steps must be at most 2147483647", {}),
        ({"k": 1, "j": 2}, "staleness.k must be at least j = 2, got 1", {}),
        ({"j": 6}, "staleness.k must be at least j = 6, got 4", {}),
        ({"j": 1.5}, "j must be a whole number", {}),
        ({"j": 1e20, "k": "inf"}, "j must be at most 2147483647, got 1e+20", {}),
        ({"k": "many"}, "k must be a number, got 'many'", {}),
        ({"k": 1e20}, "k must be at most 2147483647, got 1e+20", {}),
        ({"k": "inf"}, "staleness.k must be a number with training.old_logprobs", {"k_finite": True}),
        ({"mode": "x"}, "mode must be one of auto, on_policy", {}),
        ({"learning_rate": -1}, "learning_rate must be a positive number", {}),
        ({"learning_rate": "inf"}, "learning_rate must be a positive number, got inf", {}),
        ({"learning_rate": 10**30}, "learning_rate must be at most 2147483647, got 1e+30", {}),
        ({"temperature": True}, "temperature must be a number", {}),
        ({"temperature": "inf"}, "temperature must be a positive number, got inf", {}),
        ({"temperature": 1e-6}, "temperature must be from 1e-05 to 100, got 1e-06", {}),
        ({"temperature": 101}, "temperature must be from 1e-05 to 100, got 101", {}),
        ({"rollouts_per_step": 3}, "rollouts_per_step must be a multiple of the group size 2, got 3", {}),
        ({"rollouts_per_step": 10**300}, "rollouts_per_step must be at most 2147483647, got 1e+300", {}),
        (
            {"rollouts_per_step": 102},
            "rollouts_per_step must be at most 100, the capacity of the streams",
            {"max_groups": 50},
        ),
        ({"rollouts_per_step": 15}, "rollouts_per_step must be at least the largest group size, 16, got 15", MIXED),
        ({"rollouts_per_step": 19}, "rollouts_per_step must be at most 18, the capacity", MIXED | {"max_groups": 3}),
        *(
            ({name: 1}, "unknown knob", {})
            for name in ("q", "group_sizes", "max_groups", "", "__class__", "engines_max.b")
        ),
        ({"engines_max.torch": 2}, "unknown type 'torch'; types that elastic.types names are bigram", LIMITS),
        ({"engines_min.bigram": 9}, "engines_min.bigram and engines_max.bigram must be in order, from 0", LIMITS),
        ({"engines_max.bigram": 1.5}, "engines_max.bigram must be a whole number, got 1.5", LIMITS),
        ({"engines_max": 3}, "engines_max must be a table of whole numbers by engine type, got 3", LIMITS),
    ],
)
def test_invalid_knob_patch_is_rejected_with_one_sentence(change, sentence, before):
    with pytest.raises(RecipeError) as refused:
        knobs(**before).patched(change)
    assert str(refused.value).startswith(sentence)


@pytest.mark.parametrize(
    "value", [None, [], {}, "", "1e999x", True, 10**400, math.nan, "nan", [[1]] * 10**5], ids=lambda v: type(v).__name__
)
@pytest.mark.parametrize("name", ["j", "k", "learning_rate", "mode"])
def test_meaningless_knob_values_get_a_short_error(name, value):
    with pytest.raises(RecipeError) as refused:
        knobs().patched({name: value})
    assert str(refused.value).startswith((f"{name} must be", f"staleness.{name} must be"))
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize(
    ("sizes", "rollouts", "groups"),
    [
        ({"a": 8, "b": 8}, 64, 8),
        ({"a": 16, "b": 8}, 48, 4),
        ({"a": 16, "b": 8}, 16, 1),
        ({"a": 32, "b": 1}, 64, 4),
        ({"a": 4096, "b": 1}, 4096, 2),
    ],
)
def test_groups_per_step_is_rollouts_per_step_divided_by_the_mean_group_size(sizes, rollouts, groups):
    made = knobs(domain_weights={"a": 1.0, "b": 1.0}, group_sizes=sizes, rollouts_per_step=rollouts)
    assert made.groups_per_step == groups
    assert made.patched({"domain_weights.a": 0}).groups_per_step == rollouts // sizes["b"], "it follows live weights"
