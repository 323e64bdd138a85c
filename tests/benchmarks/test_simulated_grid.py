"""Tests of the benchmark that compares the lag that a run chooses with the best of seven fixed settings."""

import pytest

from benchmarks.simulated_grid import COSTS, SHIFTS, Cell, compared, settled_after


@pytest.mark.parametrize("side", ["trainer-bound", "balanced", "engine-bound"])
def test_auto_learns_nearly_as_much_per_hour_as_the_best_fixed_setting(side):
    results = compared(Cell("log-normal", side, 2, 0.1), 0, steps=60)
    assert set(results) == set(COSTS)
    for result in results.values():
        assert result.ratio <= 1.06
        assert result.discarded <= 0.005
    assert results["hot"].age <= results["cold"].age, "dear lag is held less"


def test_auto_settles_soon_after_half_of_the_engines_are_lost():
    shift = "half the engines"
    assert shift in SHIFTS
    assert settled_after(Cell("log-normal", "balanced", 8, 0.1), shift) <= 12
