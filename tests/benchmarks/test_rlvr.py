"""The benchmark `rlvr` reports a rise only if the reward intervals of first and last steps do not overlap."""

import pytest

from benchmarks.rlvr import WINDOW, curves, rows


def step(number, **rewards):
    return {"kind": "step", "step": number, "by_domain": {name: {"reward": each} for name, each in rewards.items()}}


def straight(first, last, *, spread=0.0):
    """Return the curves of a reward that moves linearly from `first` to `last`; every other step adds `spread`."""
    count = 4 * WINDOW
    rewards = [first + (last - first) * place / (count - 1) + spread * (place % 2) for place in range(count)]
    steps = [step(place + 1, sums=reward) for place, reward in enumerate(rewards)]
    held_out = [{"by_domain": {"sums": {"accuracy": value}}} for value in (first, last)]
    return curves(steps, held_out, "sums")


def test_rising_reward_is_reported_as_risen():
    result = straight(0.2, 0.8)
    assert result["rises"] is True
    assert result["first"]["median"] < 0.4 < 0.6 < result["last"]["median"]
    assert result["held_out"] == [0.2, 0.8]


@pytest.mark.parametrize(("first", "last", "spread"), [(0.5, 0.5, 0.0), (0.6, 0.5, 0.0), (0.5, 0.55, 0.4)])
def test_flat_falling_or_noisy_reward_is_not_reported_as_risen(first, last, spread):
    assert straight(first, last, spread=spread)["rises"] is False


def test_rlvr_benchmark_table_has_a_row_per_seed_and_domain():
    runs = [{"seed": seed, "domains": {"sums": straight(0.2, 0.8)}} for seed in range(3)]
    runs[1]["domains"] = {"sums": straight(0.6, 0.5)}
    assert [row.met for row in rows(runs)] == [True, False, True]
