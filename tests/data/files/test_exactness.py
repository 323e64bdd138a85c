"""Values of a data file reach the problem unchanged, or their row is refused by file and number."""

from __future__ import annotations

import csv
import datetime
import gzip
import io
import json
import math
from decimal import Decimal
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

from pipelinerl.data.files import rows
from pipelinerl.data.files.values import MOST_DEPTH, decode, plain
from pipelinerl.errors import RecipeError
from tests.data.files.test_source import one, opened, problems_of, saved_to_disk

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def written(path, text):
    path.write_bytes(text.encode())
    return path


# --- JSON ------------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=9)
NUMBERS = st.one_of(
    st.integers(-(10**30), 10**30),
    st.floats(allow_nan=False, allow_infinity=False),
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**40), max_value=10**40),
)
VALUES = st.recursive(
    st.none() | st.booleans() | TEXTS | NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


def spelled(value):
    """Spell a value in JSON, with all digits of its numbers."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{spelled(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",\n".join(map(spelled, value)) + "]"
    return str(value) if isinstance(value, Decimal) else json.dumps(value)


def same(came, went):
    """Return whether a value that came out of a row equals the one that went in, number by number."""
    if isinstance(went, dict):
        return isinstance(came, dict) and came.keys() == went.keys() and all(same(came[k], went[k]) for k in went)
    if isinstance(went, list):
        return isinstance(came, list) and len(came) == len(went) and all(map(same, came, went))
    if isinstance(went, int | float | Decimal) and not isinstance(went, bool):
        exact = Decimal(came) if isinstance(came, str) else Decimal(repr(came))
        return exact == Decimal(repr(went) if isinstance(went, float) else went)
    return type(came) is type(went) and bool(came == went)


@FEW
@given(answer=VALUES.filter(lambda value: value is not None), metadata=st.dictionaries(TEXTS, VALUES, max_size=3))
@example(answer=2**64, metadata={"x": [2**64 - 1, -(2**63), -(2**63) - 1]})
@example(answer=0.1 + 0.2, metadata={"x": [-0.0, 5e-324, Decimal("1e400"), Decimal("3.14159265358979323846")]})
@example(answer="\0\r\n\ufeff\u2028\U0001f600", metadata={"": {"": None}})
def test_json_values_reach_the_problem_unchanged(answer, metadata, tmp_path):
    row = '{"prompt":"a","answer":' + spelled(answer) + ',"metadata":' + spelled(metadata) + "}"
    lines = written(tmp_path / "a.jsonl", "\ufeff\r\n" + row.replace("\n", " ") + "\r\n\r\n")
    problem = one(lines)
    assert one(written(tmp_path / "a.json", f" [\n{row}\n] ")) == problem
    assert same(problem.metadata, metadata)
    truth = problem.ground_truth
    if isinstance(answer, str | bool):
        assert truth == str(answer)
    else:
        assert same(decode(truth.encode()) if isinstance(answer, list | dict) else truth, answer)
    assert same(msgspec.msgpack.decode(msgspec.msgpack.encode(problem.metadata)), metadata), "the actors get the same"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("NaN", "NaN is not a JSON number"),
        ("-Infinity", "-Infinity is not a JSON number"),
        ("1e99999999999999999999", "out of range"),
        ("1e99999", "out of range"),
        ("1" * 5_000, "5000 digits"),
        (r'"\ud800"', "half of a surrogate pair"),
        ('{"a": 1, "a": 2}', "the key 'a' occurs twice"),
        ("[" * 3_000 + "]" * 3_000, f"nested deeper than {MOST_DEPTH} levels|nested too deeply"),
        ("[" * 200 + "]" * 200, f"nested deeper than {MOST_DEPTH} levels"),
        ('"\n"', "control character"),
        ("01", "delimiter"),
    ],
)
@pytest.mark.parametrize("field", ["answer", "metadata"])
def test_json_row_with_an_inexact_value_is_refused_with_its_place(value, reason, field, tmp_path):
    given = {"answer": "1", "metadata": "{}"} | {field: value if field == "answer" else f'{{"x": {value}}}'}
    row = f'{{"prompt": "a", "answer": {given["answer"]}, "metadata": {given["metadata"]}}}'
    for name, text, place in (
        ("a.jsonl", f'{{"prompt": "b", "answer": 1}}\n{row}', "line 2"),
        ("a.json", f'[{{"prompt": "b", "answer": 1}},{row}]', "row 1"),
    ):
        if value == '"\n"' and name == "a.jsonl":
            continue  # this is two lines
        with pytest.raises(RecipeError, match=rf"{name}.* {place}: .*({reason})"):
            problems_of(written(tmp_path / name, text))


@pytest.mark.parametrize(
    "content", [b'{"prompt": "\xff", "answer": 1}', b"\xff\xfe{\x00}\x00", b'["\xc3\xa9' + b"\xc3\xa9" * 60]
)
def test_file_that_is_no_utf_8_or_no_object_is_refused(content, tmp_path):
    for name in ("a.jsonl", "a.json", *(["a.csv"] if b"\xff" in content else [])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(RecipeError, match=rf"{name} "):
            problems_of(tmp_path / name)


def test_file_of_newlines_is_empty_and_a_bomb_of_them_is_refused(tmp_path, monkeypatch):
    with pytest.raises(RecipeError, match="is empty"):
        opened(written(tmp_path / "a.jsonl", "\n\r\n \n" * 2**20))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" * 2**21))
    monkeypatch.setattr(rows, "_UNPACKED_BYTES", 2**20)
    with pytest.raises(RecipeError, match=r"a\.jsonl\.gz unpacks to more than 200 times its size"):
        opened(tmp_path / "a.jsonl.gz")


# --- CSV -------------------------------------------------------------------------------------------------------------


@FEW
@given(answer=TEXTS, level=TEXTS)
@example(answer="0.10", level='"\r\n,\0\n')
def test_csv_cells_reach_the_problem_unchanged(answer, level, tmp_path):
    text = io.StringIO(newline="")
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows([["prompt", "answer", "level"], ["a", answer, level]])
    problem = one(written(tmp_path / "a.csv", "\ufeff" + text.getvalue()), metadata_fields=["level"])
    assert (problem.ground_truth, problem.metadata) == (answer, {"level": level})


# --- Arrow -----------------------------------------------------------------------------------------------------------


def as_parquet(folder, table):
    pq.write_table(table, folder / "a.parquet")
    return folder / "a.parquet"


def as_arrow(folder, table):
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    return folder / "a.arrow"


ARROW: list[tuple[pa.Array, Any]] = [
    (pa.array([2**64 - 1], pa.uint64()), 2**64 - 1),
    (pa.array([-(2**63)]), -(2**63)),
    (pa.array([0.1 + 0.2]), 0.1 + 0.2),
    (pa.array([0.5], pa.float32()), 0.5),
    (pa.array([True]), True),
    (pa.array([Decimal("-12345678901234567890.10")]), "-12345678901234567890.10"),
    (pa.array([Decimal("1.5")], pa.decimal256(60, 20)), "1.50000000000000000000"),
    (pa.array([datetime.date(2026, 1, 31)]), "2026-01-31"),
    (pa.array([datetime.datetime(2026, 1, 31, 12)]), "2026-01-31 12:00:00"),
    (pa.array([datetime.time(12, 0, 1)]), "12:00:01"),
    (pa.array(["x", "x"]).dictionary_encode()[:1], "x"),
    (pa.array(["é\0"], pa.large_string()), "é\0"),
    (pa.array([[1, None]]), [1, None]),
    (pa.array([[2**70]], pa.list_(pa.decimal128(38, 0))), [str(2**70)]),
    (pa.array([{"a": {"b": [{"c": 1}, {"d": None}]}}]), {"a": {"b": [{"c": 1}, {}]}}),
    (pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64())), [["k", 1]]),
]


@pytest.mark.parametrize("write", [as_parquet, as_arrow])
@pytest.mark.parametrize(("column", "value"), ARROW, ids=lambda each: str(getattr(each, "type", "")))
def test_arrow_values_reach_the_problem_unchanged(column, value, write, tmp_path):
    table = pa.table({"prompt": ["a"], "answer": column, "x": column})
    problem = one(write(tmp_path, table), metadata_fields=["x"])
    assert problem.metadata == {"x": value} and type(problem.metadata["x"]) is type(value)
    text = json.dumps(value, separators=(",", ":")) if isinstance(value, list | dict) else str(value)
    assert problem.ground_truth == text


NO_UTF_8 = pa.StringArray.from_buffers(2, pa.array([0, 0, 1], pa.int32()).buffers()[1], pa.py_buffer(b"\xff"))


@pytest.mark.parametrize("write", [as_parquet, as_arrow])
@pytest.mark.parametrize(
    ("column", "reason"),
    [
        (pa.array([None, b"12"]), "holds a value of type binary"),
        (pa.array([None, {"bytes": b"12"}]), "holds a value of type binary"),
        (pa.array([None, datetime.timedelta(1)]), "holds a value of type"),
        (pa.array([None, math.nan]), "holds nan"),
        (pa.array([None, [math.inf]]), "holds inf"),
        (pa.array([None, 10**8], pa.date32()), "cannot be converted"),
        (NO_UTF_8, "cannot be converted"),
    ],
)
@pytest.mark.parametrize("field", ["answer", "x"])
def test_arrow_value_without_an_exact_form_is_refused_with_its_row(column, reason, field, write, tmp_path):
    columns = {"prompt": pa.array(["a", "b"]), "answer": pa.array(["1", "2"]), "x": pa.array(["1", "2"])}
    if field == "answer":
        column = column[1:]
        columns = {name: values[1:] for name, values in columns.items()}
    path = write(tmp_path, pa.table({**columns, field: column}))
    with pytest.raises(RecipeError, match=rf"a\.\w+ row {0 if field == 'answer' else 1}\b.* {reason}"):
        problems_of(path, metadata_fields=["x"])


@pytest.mark.parametrize("value", [{"metadata": {"a": [{"b": [0.5, math.nan]}]}}, {"x": {"k": {"y": -math.inf}}}])
@pytest.mark.parametrize("write", [as_parquet, as_arrow])
def test_arrow_row_that_is_not_finite_is_refused_before_the_run_wherever_it_is(value, write, tmp_path):
    filled = [{"prompt": f"p{n}", "answer": "1", **(value if n == 70 else {})} for n in range(100)]
    path = write(tmp_path, pa.Table.from_pylist([*filled[70:71], *filled]).slice(1))
    with pytest.raises(RecipeError, match=r"a\.\w+ row 70: field '\w+' holds (nan|-?inf)"):
        opened(path, **({"metadata_fields": ["x"]} if "x" in value else {}))


def test_arrow_file_with_two_columns_of_one_name_is_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["1"]), pa.array(["2"])], ["prompt", "answer", "answer"])
    with pytest.raises(RecipeError, match=r"a\.arrow has several columns 'answer'"):
        problems_of(as_arrow(tmp_path, table))


def test_python_values_of_a_users_rows_are_converted_or_refused():
    import numpy as np

    assert plain({"a": (np.int64(3), np.array([0.5]))}, "f") == {"a": [3, [0.5]]}
    for value in (object(), {1: "a"}, {"a": "\ud800"}, b"x", Decimal("NaN"), {1, 2}):
        with pytest.raises(RecipeError, match=r"^field 'f' "):
            plain(value, "f")


# --- descriptions of folders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("state.json", '{"_data_files": [{"filename": "../secret.arrow"}]}'),
        ("state.json", '{"_data_files": [{"filename": "/secret.arrow"}]}'),
        ("state.json", '{"_data_files": [{"filename": "absent.arrow"}]}'),
        ("state.json", '{"_data_files": [{"filename": 3}]}'),
        ("state.json", '{"_data_files": {}}'),
        ("state.json", "[" * 3_000),
        ("dataset_dict.json", '{"splits": ["../set"]}'),
        ("dataset_dict.json", '{"splits": [["train"]]}'),
        ("dataset_dict.json", '{"splits": ["absent"]}'),
        ("README.md", "configs:\n- config_name: a\n  data_dir: /abs\n  data_files: '*.jsonl'\n"),
        ("README.md", "configs:\n- config_name: a\n  data_dir: ../..\n  data_files: '*.jsonl'\n"),
        ("README.md", "configs:\n- config_name: a\n  data_dir: 3\n  data_files: '*.jsonl'\n"),
        ("README.md", "configs:\n- config_name: a\n  data_files: ['']\n"),
        ("README.md", "configs:\n- config_name: a\n  data_files: '**a'\n"),
        ("README.md", "configs:\n- config_name: a\n  data_files: {train: x}\n"),
        ("README.md", "configs:\n- config_name: a\n  data_files: [{path: x}]\n"),
        ("README.md", "configs: " + "[" * 1_200 + "\n"),
        ("README.md", "- configs\n"),
    ],
)
def test_damaged_or_hostile_description_of_a_folder_is_refused(name, text, tmp_path):
    folder = saved_to_disk(tmp_path / "set")
    (folder / "state.json").unlink()
    (folder / name).write_text(f"---\n{text}---\n" if name == "README.md" else text)
    saved_to_disk(tmp_path / "secret")
    with pytest.raises(RecipeError, match=r"set"):
        opened(folder)
