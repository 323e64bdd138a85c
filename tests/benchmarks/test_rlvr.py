"""The benchmark `rlvr` calls a reward risen only where the intervals of its first and last steps do not touch."""

from __future__ import annotations

import pytest

from benchmarks.rlvr import RECIPE, SEEDS, WINDOW, curves, rows
from pipelinerl.config.recipe import load


def step(number: int, **rewards: float) -> dict[str, object]:
    return {"kind": "step", "step": number, "by_domain": {name: {"reward": each} for name, each in rewards.items()}}


def told(first: float, last: float, *, spread: float = 0.0) -> dict[str, object]:
    """Curves of a domain that goes from `first` to `last` in a straight line, every other step `spread` above it."""
    count = 4 * WINDOW
    rewards = [first + (last - first) * place / (count - 1) + spread * (place % 2) for place in range(count)]
    steps = [step(place + 1, sums=reward) for place, reward in enumerate(rewards)]
    held_out = [{"by_domain": {"sums": {"accuracy": value}}} for value in (first, last)]
    return curves(steps, held_out, "sums")


def test_a_reward_that_climbs_rises() -> None:
    found = told(0.2, 0.8)
    assert found["rises"] is True
    assert found["first"]["median"] < 0.4 < 0.6 < found["last"]["median"]
    assert found["held_out"] == [0.2, 0.8]


@pytest.mark.parametrize(("first", "last", "spread"), [(0.5, 0.5, 0.0), (0.6, 0.5, 0.0), (0.5, 0.55, 0.4)])
def test_one_that_stays_falls_or_only_swings_does_not(first: float, last: float, spread: float) -> None:
    assert told(first, last, spread=spread)["rises"] is False


def test_steps_without_a_domain_are_left_out() -> None:
    steps = [step(place, sums=0.1) if place % 2 else step(place, others=0.9) for place in range(1, 21)]
    held_out = [{"by_domain": {"sums": {"accuracy": 0.0}}}]
    assert curves(steps, held_out, "sums")["rewards"] == [0.1] * 10


def test_the_table_says_of_each_seed_and_domain_whether_it_rises_and_what_all_cost() -> None:
    runs = [{"seed": seed, "cpu_s": 900, "domains": {"sums": told(0.2, 0.8)}} for seed in SEEDS]
    runs[1]["domains"] = {"sums": told(0.6, 0.5)}
    assert [row.met for row in rows(runs)] == [True, False, True, False]
    assert [row.met for row in rows(runs[:2])] == [True, False, True]


def test_the_recipe_has_three_domains_each_with_a_verifier_of_its_own() -> None:
    config = load(RECIPE)
    assert len({domain.verifier for domain in config.trained_domains}) == len(config.trained_domains) == 3
    assert config.run.steps >= 2 * WINDOW
