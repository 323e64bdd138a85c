"""The schedules benchmark compares runs that differ only in schedule, with equal rollouts and optimizer steps."""

import pytest

from benchmarks import schedules as benchmark
from benchmarks.arms import FinishedRun, Job
from benchmarks.schedules import RECIPE, bounds, cells, chosen, figures, ratios, schedules
from pipelinerl.config.recipe import load
from pipelinerl.observability.run_history import tell
from tests.benchmarks.test_arms import events_of

CELLS = cells(quick=False, recipe=RECIPE)


def config_of(schedule, cell):
    return load(RECIPE, [*cell.changes, *schedule.changes(cell)])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_compared_schedules_use_equal_numbers_of_rollouts_and_optimizer_steps(cell):
    for config in (config_of(schedule, cell) for schedule in schedules()):
        rollouts = load(RECIPE).training.rollouts_per_step
        assert config.run.steps * config.training.rollouts_per_step == rollouts * cell.optimizer_steps
        assert config.optimizer_steps == cell.optimizer_steps
        assert config.training.rollouts_per_step == rollouts * config.training.mini_batches


def test_seconds_to_a_reward_are_read_from_the_reward_curve():
    run = FinishedRun(config=load(RECIPE), history=tell(events_of(8)), completed=True, accuracy=0.5)
    row = figures(Job("conventional G = 2", 0, RECIPE, ()), run)
    assert (row["seconds_to_0.6"], row["seconds_to_0.7"]) == (4.0, 5.0), "two steps before it was trained"
    assert row["lag"] == pytest.approx((2.0 - 1) * 2 + 1.5)


def test_gain_of_a_schedule_is_bounded_by_the_busier_of_engine_and_trainer():
    def row(arm, seconds, engine_s, compute_s):
        return {"cell": "c", "arm": arm, "seconds": seconds, "engine_s": engine_s, "compute_s": compute_s}

    rows = [
        row("conventional G = 1", 120.0, 60.0, 50.0),
        row("conventional G = 4", 100.0, 50.0, 40.0),
        row("in flight", 70.0, 60.0, 40.0),
        {"cell": "old", "arm": "in flight", "seconds": 9.0},
    ]
    assert bounds(rows) == {"bounds": {"c": {"in flight": pytest.approx({"ratio": 0.7, "bound": 0.6, "share": 0.75})}}}


def test_time_to_a_reward_is_compared_for_each_seed_with_the_fastest_conventional_schedule():
    times = {"conventional G = 1": (10.0, 30.0), "conventional G = 4": (12.0, 20.0), "drain": (6.0, 5.0)}
    rows = [
        {"cell": "c", "recipe": RECIPE, "arm": arm, "seed": seed, "seconds_to_0.6": seconds, "seconds_to_0.7": None}
        for arm, both in times.items()
        for seed, seconds in enumerate(both)
    ]
    ratio_rows = ratios(rows)["seconds_over_best_conventional"]
    assert ratio_rows.keys() == {"c, reward 0.6"}, "no arm has reached 0.7"
    assert ratio_rows["c, reward 0.6"]["best conventional"] == "conventional G = 4"
    assert ratio_rows["c, reward 0.6"]["drain"]["median"] == pytest.approx((0.5 + 0.25) / 2)


def test_benchmark_picks_each_schedules_fastest_core_allocation_and_then_its_best_learning_rate(monkeypatch):
    def measure(name, jobs, *_, **__):
        fast, good = "engine.count=2", "learning_rate=0.001"
        assert all(job.seed not in (0, 1, 2) for job in jobs)
        return [{"seconds": float(fast not in job.changes), "area": float(good in job.changes[-1])} for job in jobs]

    monkeypatch.setattr(benchmark, "PARALLEL", ("launch.threads=1", "engine.count=2"))
    monkeypatch.setattr(benchmark, "measured", measure)
    synchronous, *_, in_flight = schedules()
    keys = chosen("schedules_tiny", CELLS[:1], [synchronous, in_flight])
    assert keys[CELLS[0], synchronous] == ("engine.count=2", "optimizer.learning_rate=0.001")
    assert keys[CELLS[0], in_flight] == ("optimizer.learning_rate=0.001",)
