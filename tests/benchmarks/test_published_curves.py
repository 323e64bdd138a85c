"""Published curves: deviations, and, in the slow form, the headline figures within 25 %."""

from __future__ import annotations

import pytest

from benchmarks.published_curves import TOLERANCE, Comparison, conventional, heavy_tailed, in_flight, rlax
from pipelinerl.simulation.published import published_hardware

H100 = published_hardware("h100:7b")
LENGTHS = heavy_tailed(503.0, 1.0, 8192)


@pytest.mark.parametrize(("simulated", "met"), [(1.5, True), (2.5, True), (1.49, False), (2.51, False)])
def test_comparison_is_met_within_a_quarter(simulated: float, met: bool) -> None:
    assert Comparison("a", "§5", 2.0, simulated).row.met is met


def test_lengths_have_the_given_mean() -> None:
    assert LENGTHS.mean == pytest.approx(503, rel=0.01)


def test_conventional_throughput_grows_with_the_batches_of_a_generation() -> None:
    one, four = (conventional(LENGTHS, steps=2, table=H100, batches=g).rollouts_per_s for g in (1, 4))
    assert 1 < four / one < 4


def test_in_flight_keeps_the_rows_full() -> None:
    prediction = in_flight(LENGTHS, steps=10, table=H100)
    assert prediction.rows == pytest.approx(64, abs=1)


@pytest.mark.slow
def test_headline_figures_are_within_the_tolerance() -> None:
    fast, slow = in_flight(LENGTHS, steps=60, table=H100), conventional(LENGTHS, steps=2, table=H100)
    assert fast.rollouts_per_s / slow.rollouts_per_s == pytest.approx(2.0, rel=TOLERANCE)
    assert rlax(128, steps=80).step_s / rlax(1024, steps=80).step_s == pytest.approx(3.6, rel=TOLERANCE)
