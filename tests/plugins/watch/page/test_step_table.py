"""The table of step metrics merges old rows to bound its memory, but keeps their outliers, also across resumes."""

import math

import numpy as np

from pipelinerl.plugins.watch.page.step_table import MOST_FIGURES, StepTable, plain, plain_columns
from pipelinerl.rng import generator


def table(steps, *, most_numbers=2**25, **fields):
    made = StepTable(most_numbers=most_numbers)
    for step in range(1, steps + 1):
        made.add({"kind": "step", "step": step, "elapsed_s": 2.0 * step, "rollouts": 4, "reward": step / 100, **fields})
    return made


def test_merged_rows_of_the_step_table_keep_minimum_and_maximum_of_each_metric():
    values = generator(0, "table").normal(size=5000)
    made = StepTable()
    for step, value in enumerate(values.tolist(), start=1):
        made.add({"step": step, "elapsed_s": float(step), "reward": value, "loss": None if step % 2 else value})
    rows = made.rows(["reward", "loss"], points=100)
    parts = values.astype(np.float32).reshape(100, 50)
    assert rows.each == 50 and rows.places["step"].tolist() == list(range(50, 5001, 50))
    assert np.array_equal(rows.lows["reward"], parts.min(axis=1))
    assert np.array_equal(rows.highs["reward"], parts.max(axis=1))
    assert np.allclose(rows.means["reward"], parts.mean(axis=1), atol=1e-6)
    assert np.allclose(rows.means["loss"], parts[:, 1::2].mean(axis=1), atol=1e-6), "steps without loss are ignored"


def test_step_table_of_a_long_run_keeps_outliers_in_bounded_memory():
    made = StepTable(most_numbers=64 * 20_000)
    for step in range(1, 100_001):
        made.add({"step": step, "reward": {3_000: -7.0, 3_001: 9.0}.get(step, 0.5), "rollouts": 2})
    assert made.count <= 20_000 and made.bounds[1] == 100_000
    rows = made.rows(["reward"], points=50)
    assert float(np.nanmin(rows.lows["reward"])) == -7.0 and float(np.nanmax(rows.highs["reward"])) == 9.0
    assert rows.places["samples"][-1] == 200_000
    assert np.all(np.diff(rows.places["step"]) > 0)
    fresh = made.rows(["reward"], points=200, first=99_900)
    assert fresh.each == 1 and len(fresh.places["step"]) == 101, "the newest rows are not thinned"


def test_adding_an_earlier_step_again_replaces_its_row_and_drops_all_later_rows_of_the_step_table():
    made = table(9000)
    assert made.add({"step": 4000, "reward": 7.0, "rollouts": 4})
    assert made.bounds == (1, 4000) and made.count == 4000
    assert made.rows(["reward"], points=4000, first=3999).means["reward"].tolist()[1] == 7.0
    assert not made.add({"step": 4001, "reward": 8.0})
    assert made.rows([], points=10, since=3999).places["samples"].tolist() == [16000.0, 16000.0]
    assert made.add({"step": 1, "reward": 1.0}) and made.count == 1


def test_rows_since_a_position_are_all_later_rows_even_across_a_chunk_boundary_of_the_step_table():
    made = table(4099)  # more steps than one chunk of the table holds (4096)
    whole = made.rows(["reward"], points=4100)
    for since in (0, 4095, 4096, 4098, 4099, 9999):
        rows = made.rows(["reward", "nothing"], points=4100, since=since)
        assert rows.each == 1 and set(rows.means) == {"reward"}
        assert np.array_equal(rows.means["reward"], whole.means["reward"][since:]), since
        assert np.array_equal(rows.places["samples"], whole.places["samples"][since:]), since


def test_rounding_all_columns_at_once_gives_the_same_values_as_rounding_each_column():
    columns = {"a": np.array([1.23456789, np.nan]), "b": np.array([-1e-9, 12345678.0])}
    assert plain_columns(columns) == {name: plain(column) for name, column in columns.items()}
    assert plain_columns({}) == {} and plain_columns({"a": np.zeros(0)}) == {"a": []}


def test_step_table_names_domain_metrics_by_path_and_ignores_invalid_values():
    made = StepTable()
    odd = {"huge": 10**400, "nan": math.nan, "text": "x", "flag": True, "list": [1], "big": 1e200}
    domains = {"a/b": {"reward": 1.0, "x": "y"}, "c": 3}
    made.add({"step": 1, **odd, "by_domain": domains, "by_tag": {"level=1": {"accuracy": 0.5}}})
    assert made.figures == ["big", "domain/a/b/reward", "tag/level=1/accuracy"]
    assert plain(made.rows(["big"], points=2).means["big"]) == [None]
    for step in ("1", None, -1, 2**60, 1.5):
        assert not made.add({"step": step})
    assert made.count == 1


def test_step_table_fills_a_new_metric_with_nan_for_earlier_steps_and_drops_metrics_over_its_limit():
    made = table(10)
    made.add({"step": 11, **{f"figure {number}": 1.0 for number in range(2 * MOST_FIGURES)}})
    assert len(made.figures) == MOST_FIGURES
    rows = made.rows(["figure 70", "reward"], points=20)
    assert np.isnan(rows.means["figure 70"][:10]).all() and rows.means["figure 70"][10] == 1.0


def test_numbers_for_json_are_rounded_and_non_finite_ones_become_none():
    values = np.array([0.1, np.float32(0.41), 1234567.0, 1e-9, 0.0, -2.5, np.nan, np.inf])
    assert plain(values) == [0.1, 0.41, 1234570.0, 1e-09, 0.0, -2.5, None, None]
    assert plain(np.array([1234567.0]), 12) == [1234567.0]
