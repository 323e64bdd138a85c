"""Tests of the benchmark that simulates schedules on published hardware: throughput and staleness of each."""

from benchmarks.simulated_schedules import GENERATIONS, arms


def test_simulated_schedules_have_the_expected_policy_lag_and_order_of_throughput():
    results = {each.arm: each for each in arms(8, steps=6)}
    conventional = [results[f"conventional G = {generation}"] for generation in GENERATIONS]
    assert [each.lag for each in conventional] == [(generation + 1) / 2 for generation in GENERATIONS]
    speeds = [each.steps_per_hour for each in conventional]
    assert speeds == sorted(speeds), "larger generations wait less often for their longest answer"
    one_step_off, in_flight = results["one step off"], results["in flight, k = 8"]
    assert 1 < one_step_off.lag <= 2 and in_flight.lag <= 8
    assert in_flight.steps_per_hour > one_step_off.steps_per_hour > conventional[0].steps_per_hour
    assert 0 < in_flight.engines < in_flight.gpus == 8
