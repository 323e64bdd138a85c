"""Paired measurements, which alternate between the compared variants, and their tables and records."""

import json

import pytest

from benchmarks.__main__ import main, names
from benchmarks.measure import Interval, Paired, Row, paired, print_table, recorded_parts, write_record


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
    assert all(part in out for part in ("2 [1.9, 2.1]", "MISSED", "0.1235"))


def test_results_of_benchmark_parts_that_are_not_rerun_are_read_from_the_record(tmp_path):
    assert recorded_parts("x", ["turn"], folder=tmp_path) == {}
    write_record("x", {"turn": {"ms": 1}, "other": 2}, folder=tmp_path)
    assert recorded_parts("x", ["turn", "memory"], folder=tmp_path) == {"turn": {"ms": 1}}


def test_list_of_benchmarks_has_one_line_per_benchmark(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(names())
    assert "measure" not in names()
    assert all(len(line) <= 125 and line.endswith(".") for line in lines)
