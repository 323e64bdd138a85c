"""Tests of `EngineSpeeds`: engines of different speeds, batches and step costs."""

import random

import pytest

from pipelinerl.controller.decisions.engine_speeds import EngineSpeeds

A, B, C = "http://a", "http://b", "http://c"


def measured(rows, speeds, *, per_row, polls=30):
    """Return measurements of engines whose steps take (1 + per_row · rows) ms / speed, with noise of 5 %."""
    made, drawn = EngineSpeeds(), random.Random(0)
    for _ in range(polls):
        for url, usual in rows.items():
            batch = usual * drawn.uniform(0.7, 1.3)
            step_s = (1 + per_row * batch) / 1000 / speeds.get(url, 1.0) * drawn.uniform(0.95, 1.05)
            made.note(url, steps=100, rows=100 * batch, busy_s=100 * step_s)
    return made


@pytest.mark.parametrize("per_row", [0.0, 0.05, 10.0])
@pytest.mark.parametrize("rows", [{A: 16, B: 16}, {A: 16, B: 8}, {A: 4, B: 16}])
def test_speed_is_measured_whatever_a_row_costs_and_however_the_work_is_spread(rows, per_row):
    assert measured(rows, {B: 0.5}, per_row=per_row).of(rows) == {B: pytest.approx(0.5, abs=0.12)}


@pytest.mark.parametrize("per_row", [0.0, 0.05, 10.0])
@pytest.mark.parametrize("rows", [{A: 16, B: 16}, {A: 20, B: 10}])
def test_equal_engines_are_equally_fast_even_if_one_has_more_work(rows, per_row):
    assert measured(rows, {}, per_row=per_row).of(rows) == {}


def test_fleet_is_as_fast_as_most_of_its_engines():
    made = measured({A: 8, B: 8, C: 8}, {C: 3.0}, per_row=0.1)
    assert made.of([A, B, C]) == {C: pytest.approx(3.0, rel=0.1)}
    made.forget(C)
    assert made.of([A, B, C]) == {}


def test_engine_is_not_judged_by_a_few_polls_or_steps():
    assert measured({A: 8, B: 8}, {B: 0.1}, per_row=0.1, polls=3).of([A, B]) == {}
    made = measured({A: 8}, {}, per_row=0.1)
    for _ in range(9):
        made.note(B, steps=4, rows=32, busy_s=9.0)
    assert made.of([A, B]) == {}
