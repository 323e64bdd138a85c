"""Tests of training benchmarks that compare several arms (variants): metrics of a run, tables, and resumed records."""

import pytest

from benchmarks import arms
from benchmarks.arms import Column, FinishedRun, Job, figures_of, measured, table
from pipelinerl.config.recipe import load
from pipelinerl.observability.run_history import tell

JOB = Job("a", 0, "tiny", ())


def finished(events, *, accuracy=0.5):
    return FinishedRun(config=load("tiny"), history=tell(events), completed=True, accuracy=accuracy)


def events_of(steps):
    events = [{"kind": "run_started", "time": 0.0, "elapsed_s": 0.0}]
    for step in range(1, steps + 1):
        figures = {"reward": 0.1 * step, "ess": 0.9, "staleness_mean": 2.0, "rollouts": 8, "sampled_tokens": 90}
        timing = {"wait_s": 0.5, "step_s": 0.5, "stale_tokens": 10 * step}
        events.append({"kind": "step", "time": 0.0, "elapsed_s": 5.0 + step, "step": step, **figures, **timing})
    return events


def test_benchmark_metrics_are_computed_from_the_events_of_training_steps():
    row = figures_of(JOB, finished(events_of(4)))
    assert (row["accuracy"], row["age"], row["ess"]) == (0.5, 2.0, pytest.approx(0.9))
    assert (row["reward"], row["area"]) == (pytest.approx(0.4), pytest.approx(0.25))
    assert row["discarded"] == pytest.approx(40 / (40 + 360))
    assert row["tokens_per_s"] == pytest.approx(360 / 4), "the first step began one second before it ended"
    assert row["by_samples"][0] == (0.0, 0.0, 8.0, 16.0), "a reward stands where its version was made"
    assert row["by_seconds"][0] == pytest.approx((0.0, 0.0, 1.0, 2.0))


def test_benchmark_table_has_a_row_per_compared_variant_and_marks_incomplete_runs():
    def row(arm, value, completed=True):
        return {"arm": arm, "value": value, "completed": completed}

    runs = [
        row("a", 0.5),
        row("b", 0.5, completed=False),
        row("a", 0.75),
        row("c", None),
        row("d", 1.0),
        row("d", None),
    ]
    heading, rule, *lines = table(runs, [Column("held-out", "value", ".3f")]).splitlines()
    assert heading.count("|") == rule.count("|") == 3
    assert lines == [
        "| a | 0.625 [0.500, 0.750] |",
        "| b (1 of 1 incomplete) | 0.500 |",
        "| c | never |",
        "| d | 1.000 (1 of 2) |",
    ]


@pytest.fixture
def trained(monkeypatch):
    """Name each run that is trained, and keep the record in memory instead of in a file."""
    names, kept = [], {}

    def train(job, *, judged):
        names.append(f"{job.arm}{job.seed}{job.changes}")
        return finished([])

    monkeypatch.setattr(arms, "read_record", lambda name: kept)
    monkeypatch.setattr(arms, "write_record", lambda name, payload, *, quick: kept.update(payload))
    monkeypatch.setattr(arms, "train", train)
    return names


def test_recorded_benchmark_runs_are_not_repeated(trained):
    jobs = [Job("a", 0, "tiny", ("x=1",)), Job("a", 1, "tiny", ("x=1",))]

    def values(*jobs):  # without repeats, which a busy machine would cause
        rows = measured("b", jobs, lambda job, run: {"value": job.seed}, quick=False, repeats=False)
        return [row["value"] for row in rows]

    assert values(jobs[0]) == [0]
    assert values(*jobs) == [0, 1]
    values(Job("a", 0, "tiny", ("x=2",)))
    assert trained == ["a0('x=1',)", "a1('x=1',)", "a0('x=2',)"]
    kept = [(row["seed"], list(row["changes"])) for row in arms.read_record("b")["runs"]]
    assert kept == [(0, ["x=2"]), (1, ["x=1"])], "a run replaces the earlier run of its arm and seed only"


def test_benchmark_run_disturbed_by_other_processes_is_repeated_once_and_the_better_one_kept(trained, monkeypatch):
    others = iter((0.9, 0.5, 0.0))

    class Meter:
        def figures(self):
            return {"load": 1.0, "others": next(others)}

    monkeypatch.setattr(arms, "_OtherWork", Meter)
    jobs = [Job("a", 0, "tiny", ()), Job("b", 0, "tiny", ())]
    measured("b", jobs[:1], lambda job, run: {}, quick=False)
    for _ in range(2):
        rows = measured("b", jobs, lambda job, run: {}, quick=False)
    assert [each[:2] for each in trained] == ["a0", "a0", "b0"], "the second run of a, disturbed too, is accepted"
    assert [row["others"] for row in rows] == [0.5, 0.0]
