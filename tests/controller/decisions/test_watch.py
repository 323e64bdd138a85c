"""Tests of what the controller derives from polls: rates, speeds, restarts and missed polls."""

import random
from collections import Counter
from itertools import pairwise

import pytest

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.decisions.watch import POLLS_PER_S, EngineSpeeds, EngineWatch
from pipelinerl.controller.state.fleet import EngineLifecycle, EngineRecord

A, B, C = "http://a", "http://b", "http://c"


def load(**totals):
    return EngineMetrics(slots=4, **totals)


def test_engine_that_misses_several_polls_in_a_row_times_out_and_has_no_load():
    watch = EngineWatch(polls_to_death=3)
    watch.answered(A, load(running_sequences=3), 1.0)
    assert [watch.on_missed_poll(A), watch.on_missed_poll(A)] == [False, False]
    watch.answered(A, load(running_sequences=3, generated_tokens_total=50), 2.0)
    assert [watch.on_missed_poll(A), watch.on_missed_poll(A)] == [False, False]
    assert (watch.load(A).tokens_per_s, watch.load(A).metrics.running_sequences) == (50.0, 3)
    assert watch.on_missed_poll(A)
    assert (watch.load(A).tokens_per_s, watch.load(A).metrics.running_sequences) == (0.0, 0)


def test_engine_whose_counters_decrease_counts_as_restarted_unless_it_was_removed():
    watch = EngineWatch()
    assert not watch.answered(A, load(generated_tokens_total=100, weight_updates_total=3), 1.0)
    assert watch.answered(A, load(generated_tokens_total=20, weight_updates_total=3), 2.0)
    assert watch.load(A).tokens_per_s == 0.0
    assert watch.answered(A, load(generated_tokens_total=30), 3.0)
    for _ in range(2):
        watch.forget(A)
    assert watch.load(A).metrics.slots == 0
    assert not watch.answered(A, load(generated_tokens_total=20), 4.0), "nothing is known of it"


def test_token_rate_and_occupancy_are_counter_differences_over_time():
    watch = EngineWatch()
    watch.answered(A, load(generated_tokens_total=100, decode_steps_total=10, occupied_slot_steps_total=20), 1.0)
    assert watch.load(A).tokens_per_s == 0.0, "one observation is no rate"
    watch.answered(A, load(generated_tokens_total=400, decode_steps_total=20, occupied_slot_steps_total=50), 3.0)
    assert (watch.load(A).tokens_per_s, watch.load(A).occupancy) == (150.0, 30 / (10 * 4))
    watch.answered(A, load(generated_tokens_total=400, decode_steps_total=20, occupied_slot_steps_total=50), 4.0)
    assert (watch.load(A).tokens_per_s, watch.load(A).occupancy) == (0.0, 0.0)


def test_engine_occupancy_excludes_the_time_in_which_batch_rows_wait_for_requests():
    """If idle batch rows counted as busy, a run with a slow verifier would get more engines, which would also wait."""
    watch = EngineWatch()
    watch.answered(A, load(decode_steps_total=10, occupied_slot_steps_total=40, busy_s_total=1.0), 10.0)
    watch.answered(A, load(decode_steps_total=30, occupied_slot_steps_total=120, busy_s_total=1.5), 12.0)
    assert watch.load(A).occupancy == 0.25, "all four rows, a quarter of the time"
    watch.answered(A, load(decode_steps_total=50, occupied_slot_steps_total=160, busy_s_total=3.6), 14.0)
    assert watch.load(A).occupancy == 0.5, "half the rows, all the time: clocks of two machines may differ"


def test_engines_of_a_large_fleet_are_polled_in_turns_and_those_of_a_small_one_each_time():
    small = [EngineRecord(url=f"http://{number}", lifecycle=life) for number, life in enumerate(EngineLifecycle)]
    watch = EngineWatch()
    for now in (0.0, 1.0):
        assert sorted(watch.to_poll(small, now=now, every_s=1.0)) == [record.url for record in small]
    records = [EngineRecord(url=f"http://{number:04}", lifecycle=EngineLifecycle.HEALTHY) for number in range(1000)]
    suspect = EngineRecord(url="http://suspect", lifecycle=EngineLifecycle.SUSPECT)
    watch, times = EngineWatch(), dict[str, list[int]]()
    for now in range(40):
        chosen = watch.to_poll([*records, suspect], now=float(now), every_s=1.0)
        assert len(chosen) == POLLS_PER_S + 1 and chosen[0] == suspect.url, (
            "an engine that missed a poll is polled each time"
        )
        for url in chosen[1:]:
            times.setdefault(url, []).append(now)
    assert set(times) == {record.url for record in records}
    assert max(later - sooner for each in times.values() for sooner, later in pairwise(each)) <= 8
    assert set(Counter(map(len, times.values()))) <= {5, 6}


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
