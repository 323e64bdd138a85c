"""Tests of the filtered share: the estimate, its bound, and how much it shortens the wait of a trainer that filters."""

from __future__ import annotations

import random

import pytest

from pipelinerl.controller.state.filtered_share import FilteredShare
from pipelinerl.staleness import StalenessBounds


def test_initial_estimate_is_that_nothing_is_filtered() -> None:
    share = FilteredShare()
    assert (share.share, share.expected(10, waiting=3, most=4.0)) == (0.0, 10)
    share.note_step(trained=1, filtered=1)
    assert 0 < share.share < 0.2, "one step is no evidence yet"


def test_estimate_converges_to_the_filtered_share_and_follows_its_changes() -> None:
    share = FilteredShare()
    for _ in range(100):
        share.note_step(trained=8, filtered=24)
    assert share.share == pytest.approx(0.75, abs=0.05)
    for _ in range(100):
        share.note_step(trained=8, filtered=0)
    assert share.share < 0.05


def test_number_of_extra_orders_is_bounded() -> None:
    share = FilteredShare(trained=1.0, filtered=10_000.0)
    assert share.expected(30, waiting=0, most=3.0) == 10
    assert share.expected(30, waiting=0, most=1.0) == 30, "1 compensates for nothing"
    assert share.expected(30, waiting=9, most=3.0) == 16, "what waits has passed"
    assert share.expected(30, waiting=90, most=3.0) == 30


def ticks(most: float, *, filtered: float, seed: int, steps: int = 200) -> tuple[int, int]:
    """Simulate `steps` steps; return how many ticks they take, and how many groups become stale.

    An order takes three ticks and a step takes one. Engines have room for all orders; k = 4, j = 1, four groups per
    step.
    """
    noise, share, bounds, groups_per_step = random.Random(seed), FilteredShare(), StalenessBounds(1, 4), 4
    version = tick = stale = dropped = waiting = 0
    out: list[tuple[int, int]] = []  # (ends at, version)
    ready: list[int] = []
    while version < steps:
        tick += 1
        ended = [began for at, began in out if at <= tick]
        out = [each for each in out if each[0] > tick]
        kept = [began for began in ended if noise.random() >= filtered]
        dropped += len(ended) - len(kept)
        fresh = [began for began in [*ready, *kept] if bounds.accepts(producing=version + 1, oldest=began)]
        stale += len(ready) + len(kept) - len(fresh)
        ready = sorted(fresh, reverse=True)
        if len(ready) >= groups_per_step:
            ready, version = ready[groups_per_step:], version + 1
            waiting = len(ready)
            share.note_step(trained=groups_per_step, filtered=dropped)
            dropped = 0
        while bounds.may_issue(
            current=version,
            loaded=version,
            queued=share.expected(len(out) + len(ready), waiting=waiting, most=most),
            per_step=groups_per_step,
        ):
            out.append((tick + 3, version))
    return tick, stale


@pytest.mark.parametrize("seed", range(3))
def test_extra_orders_halve_the_trainers_wait_if_three_of_four_groups_are_filtered(seed: int) -> None:
    (without, _), (compensated, stale) = (ticks(most, filtered=0.75, seed=seed) for most in (1.0, 3.0))
    assert compensated < 0.5 * without
    assert stale < 0.25 * 4 * 200, "and most of what is sampled for it is trained"
    assert ticks(4.0, filtered=0.0, seed=seed) == ticks(1.0, filtered=0.0, seed=seed)
