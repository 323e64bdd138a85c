"""Paired measurements, which alternate between the compared variants, and their tables and records."""

import json

import pytest

from benchmarks.__main__ import main, names, run_benchmarks
from benchmarks.measure import (
    Interval,
    Paired,
    Row,
    bootstrap_median,
    paired,
    print_table,
    recorded_parts,
    seconds_of,
    write_record,
)
from tests.patience import SOON_S


def test_paired_measurement_alternates_between_variants_and_discards_warmup_rounds():
    ran = []

    def arm(name, value):
        ran.append(name)
        return value + len(ran)

    measured = paired({"a": lambda: arm("a", 0), "b": lambda: arm("b", 100)}, rounds=3, warmup=1)
    assert "".join(ran) == "ba" + "ab" + "ba" + "ab"
    assert measured.samples == {"a": (3, 6, 7), "b": (104, 105, 108)}
    assert measured.median("a") == 6


def test_paired_ratio_is_the_median_of_the_ratios_of_each_round():
    """In round 2 the machine is ten times slower, which would distort the ratio of the two medians."""
    measured = Paired({"slow": (2.0, 20.0, 2.2), "fast": (1.0, 10.0, 1.1)})
    assert measured.ratio("slow", "fast") == Interval(pytest.approx(2.0), pytest.approx(2.0), pytest.approx(2.0))


def test_bootstrap_interval_contains_the_median_and_is_deterministic():
    values = [1.0, 1.2, 0.9, 1.1, 1.05, 0.95, 1.3, 1.0, 1.15]
    interval = bootstrap_median(values)
    assert interval.median == 1.05
    assert min(values) <= interval.low < interval.median < interval.high <= max(values)
    assert bootstrap_median(values) == interval


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_measurement_that_is_not_a_positive_finite_number_is_rejected(value):
    with pytest.raises(ValueError, match="'a' must measure a finite positive number"):
        paired({"a": lambda: value}, rounds=1)


def test_paired_measurement_without_variants_is_rejected():
    with pytest.raises(ValueError, match="at least one arm"):
        paired({}, rounds=3)


def test_timer_returned_by_seconds_of_measures_the_wall_time_of_a_call():
    import time

    assert 0.02 <= seconds_of(lambda: time.sleep(0.02))() < SOON_S


def test_benchmark_record_names_its_machine(tmp_path):
    write_record("x", {"speed_up": Interval(2.0, 1.9, 2.1).as_dict()}, folder=tmp_path / "results")
    record = json.loads((tmp_path / "results" / "x.json").read_text())
    assert record["speed_up"] == {"median": 2.0, "low": 1.9, "high": 2.1}
    assert {"date", "python", "processor", "cores", "memory_gib", "libraries"} <= record["machine"].keys()
    with pytest.raises(ValueError):
        write_record("x", {"bad": float("nan")}, folder=tmp_path)


def test_benchmark_record_is_json_with_each_list_of_numbers_on_one_line(tmp_path):
    payload = {"fleets": [{"engines": 4, "samples": {"real": (1.5, 2.5), "none": []}}], "none": {}, "by_step": {1: 2}}
    write_record("x", payload, folder=tmp_path)
    text = (tmp_path / "x.json").read_text()
    assert '      "samples": {\n        "real": [1.5, 2.5],\n        "none": []\n      }\n' in text
    assert json.loads(text)["fleets"] == [{"engines": 4, "samples": {"real": [1.5, 2.5], "none": []}}]
    assert json.loads(text)["by_step"] == {"1": 2}


def test_benchmark_table_marks_missed_targets(capsys):
    print_table("t", [Row("speed-up", Interval(2, 1.9, 2.1), ">= 2", False), Row("time", 0.12345)])
    out = capsys.readouterr().out
    assert "2 [1.9, 2.1]" in out
    assert "MISSED" in out
    assert "0.1235" in out


def test_quick_benchmark_run_writes_no_record_file(tmp_path):
    write_record("x", {"a": 1}, quick=True, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_results_of_benchmark_parts_that_are_not_rerun_are_read_from_the_record(tmp_path):
    assert recorded_parts("x", ["turn"], folder=tmp_path) == {}
    write_record("x", {"turn": {"ms": 1}, "other": 2}, folder=tmp_path)
    assert recorded_parts("x", ["turn", "memory"], folder=tmp_path) == {"turn": {"ms": 1}}


def test_unknown_benchmark_is_rejected(capsys):
    assert run_benchmarks(["no-such"], quick=True) == 2
    assert "no benchmark is called 'no-such'" in capsys.readouterr().err


def test_option_that_a_benchmark_does_not_take_is_rejected(capsys):
    assert main(["queue", "--seeds", "1"]) == 2
    assert "queue does not take seeds; leave that out" in capsys.readouterr().err


def test_list_of_benchmarks_has_one_line_per_benchmark(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(names())
    assert "measure" not in names()
    assert all(len(line) <= 125 and line.endswith(".") for line in lines)
