"""What polls show: rates, restarts, silence."""

from __future__ import annotations

from inference_contract.schemas import EngineMetrics
from pipelinerl.controller.decisions.engine_watch import EngineWatch

A = "http://a"


def load(**totals: int) -> EngineMetrics:
    return EngineMetrics(slots=4, **totals)


def test_silence_is_several_misses_in_a_row() -> None:
    watch = EngineWatch(polls_to_death=3)
    assert [watch.on_missed_poll(A), watch.on_missed_poll(A)] == [False, False]
    watch.answered(A, load(), 1.0)
    assert [watch.on_missed_poll(A), watch.on_missed_poll(A), watch.on_missed_poll(A)] == [False, False, True]


def test_what_is_forgotten_begins_anew() -> None:
    watch = EngineWatch()
    watch.answered(A, load(generated_tokens_total=100), 1.0)
    watch.forget(A)
    watch.forget(A)
    assert watch.load(A).metrics.slots == 0
    assert not watch.answered(A, load(generated_tokens_total=20), 2.0), "no restart: nothing is known of it"


def test_counters_that_fall_tell_of_a_restart() -> None:
    watch = EngineWatch()
    assert not watch.answered(A, load(generated_tokens_total=100, weight_updates_total=3), 1.0)
    assert watch.answered(A, load(generated_tokens_total=20, weight_updates_total=3), 2.0)
    assert watch.load(A).tokens_per_s == 0.0
    assert watch.answered(A, load(generated_tokens_total=30), 3.0)


def test_rates_are_differences_over_time() -> None:
    watch = EngineWatch()
    watch.answered(A, load(generated_tokens_total=100, decode_steps_total=10, occupied_slot_steps_total=20), 1.0)
    assert watch.load(A).tokens_per_s == 0.0, "one observation is no rate"
    watch.answered(A, load(generated_tokens_total=400, decode_steps_total=20, occupied_slot_steps_total=50), 3.0)
    assert (watch.load(A).tokens_per_s, watch.load(A).occupancy) == (150.0, 30 / (10 * 4))
    watch.answered(A, load(generated_tokens_total=400, decode_steps_total=20, occupied_slot_steps_total=50), 4.0)
    assert (watch.load(A).tokens_per_s, watch.load(A).occupancy) == (0.0, 0.0)
