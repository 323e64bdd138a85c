"""Sequences join at the moment that wastes least: it depends on how long steps and prefills take."""

import pytest

from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import Gathering

ROWS, STEP_S = 32, 0.002


def _measured(fixed_s, per_token_s=1e-5):
    gathering, draw = Gathering(), rng.generator(0, "gathering")
    gathering.count_prefill(500, 30.0)  # compiles
    for tokens in draw.integers(20, 400, 60).tolist():
        gathering.count_prefill(tokens, (fixed_s + per_token_s * tokens) * draw.uniform(0.9, 1.1))
    return gathering


@pytest.mark.parametrize("fixed_s", [0.0, 0.002, 0.02])
def test_fixed_part_of_a_prefill_is_told_apart_from_the_part_for_its_tokens(fixed_s):
    assert _measured(fixed_s).fixed_s == pytest.approx(fixed_s, rel=0.15, abs=4e-4)


def test_a_single_prefill_that_compiles_does_not_make_sequences_wait_for_long():
    gathering = _measured(0.002)
    gathering.count_prefill(100, 5.0)
    assert gathering.fixed_s < 0.004


def test_sequences_join_at_once_in_an_idle_engine_and_while_the_cost_is_unknown():
    new = Gathering()
    assert new.may_join(0) and new.may_join(ROWS)
    for _ in range(20):
        new.count_prefill(100, 0.02)  # prompts of one length say nothing about the fixed part
    assert new.may_join(ROWS)
    assert _measured(0.02).may_join(0)


def test_sequences_wait_until_idle_rows_have_cost_as_much_as_a_prefill_and_never_for_long():
    gathering = _measured(0.02)
    waited = 0
    while not gathering.may_join(7):
        gathering.count_step(STEP_S, 3)
        waited += 1
    assert waited == pytest.approx(7 * 0.02 / (3 * STEP_S), rel=0.2)
    gathering.count_prefill(100, 0.021)
    assert not gathering.may_join(7)
    waited = 0
    while not gathering.may_join(1000):
        gathering.count_step(STEP_S, 1)
        waited += 1
    assert waited == 64


def _seconds(length, fixed_s, most=None):
    """Return the seconds in which rows of geometric lengths end 4,000 times.

    Free rows refill as `Gathering` says, or when there are `most` of them.
    """
    draw, gathering = rng.generator(1, "rows"), _measured(fixed_s)
    running, ended, now = ROWS, 0, 0.0
    while ended < 4000:
        free = ROWS - running
        if free and (gathering.may_join(running) if most is None else free >= most):
            gathering.count_prefill(100 * free, fixed_s + 1e-3 * free)
            now, running = now + fixed_s, ROWS
        gathering.count_step(STEP_S, ROWS - running)
        now += STEP_S
        ends = int(draw.binomial(running, 1 / length))
        running, ended = running - ends, ended + ends
    return now


@pytest.mark.parametrize("length", [20, 80, 800])
@pytest.mark.parametrize("fixed_s", [0.0, 0.002, 0.013])
def test_whole_time_is_close_to_that_of_the_best_number_of_sequences_that_join_together(length, fixed_s):
    best = min(_seconds(length, fixed_s, most) for most in (1, 2, 4, 6, 9, 13, 20, 27))
    assert _seconds(length, fixed_s) <= 1.1 * best
