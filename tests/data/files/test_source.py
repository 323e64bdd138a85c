"""The source `files`: all formats give the same problems, and errors name row and field."""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelinerl.data.files.field_map import FieldMap
from pipelinerl.data.files.rows import RowSequence
from pipelinerl.data.files.source import RowSource, index_of
from pipelinerl.data.problems import open_source
from pipelinerl.data.source import Split, digest_of
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem

Rows = list[dict[str, Any]]
ROWS: Rows = [{"prompt": f"Wie viel ist {i} + {i}?", "answer": str(2 * i)} for i in range(60)]
README = """---
license: mit
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*.parquet
  - split: test
    path: main/test-*.parquet
- config_name: hard
  data_files: hard/*.jsonl
---
# A data set
"""


def opened(path, of=Split.TRAIN, **parameters):
    given = parameters | {"path": path if isinstance(path, list) else str(path)}
    source = open_source("files", domain="d", split=of, seed=0, parameters=given)
    assert isinstance(source, RowSource)
    return source


def problems(source):
    return [source.problem(index) for index in range(len(source))]


def questions(source):
    return {problem.messages[-1].content for problem in problems(source)}


# --- formats ---------------------------------------------------------------------------------------------------------


def jsonl(path, rows=ROWS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def json_array(path, rows=ROWS):
    path.write_text(json.dumps(rows, indent=1))
    return path


def gzipped(path, rows=ROWS):
    path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in rows).encode()))
    return path


def comma_separated(path, rows=ROWS):
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    path.write_text("\ufeff" + text.getvalue())
    return path


def parquet(path, rows=ROWS):
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def arrow_stream(path, rows=ROWS):
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def saved_to_disk(folder, rows=ROWS):
    """Write the layout of `datasets.Dataset.save_to_disk`, version 4, in two files."""
    folder.mkdir(parents=True)
    names = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
    for name, part in zip(names, (rows[:25], rows[25:]), strict=True):
        arrow_stream(folder / name, part)
    (folder / "dataset_info.json").write_text(json.dumps({"features": {}, "splits": {}}))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "0", "_split": None}
    (folder / "state.json").write_text(json.dumps(state))
    return folder


WRITERS: dict[str, Callable[[Path], Path]] = {
    "a.jsonl": jsonl,
    "a.ndjson": jsonl,
    "a.json": json_array,
    "lines.json": jsonl,
    "a.jsonl.gz": gzipped,
    "a.csv": comma_separated,
    "a.parquet": parquet,
    "a.arrow": arrow_stream,
    "saved": saved_to_disk,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_data_file_format_gives_the_same_problems(name, tmp_path):
    expected = {split: problems(opened(jsonl(tmp_path / "twin.jsonl"), split)) for split in Split}
    path = WRITERS[name](tmp_path / name)
    actual = {split: problems(opened(path, split)) for split in Split}
    assert actual == expected
    assert sum(map(len, actual.values())) == len(ROWS)
    assert actual[Split.TRAIN][0].ground_truth.isdigit()


# --- splits ----------------------------------------------------------------------------------------------------------


def by_split(path, **parameters):
    splits = {split: questions(opened(path, split, **parameters)) for split in Split}
    assert not any(one & other for one, other in itertools.combinations(splits.values(), 2))
    return splits


def hub_folder(folder):
    parquet(folder / "main" / "train-00000-of-00002.parquet", ROWS[:20])
    parquet(folder / "main" / "train-00001-of-00002.parquet", ROWS[20:40])
    parquet(folder / "main" / "test-00000-of-00001.parquet", ROWS[35:50])
    (folder / "hard").mkdir()
    jsonl(folder / "hard" / "all.jsonl", ROWS[50:])
    (folder / "README.md").write_text(README)
    return folder


def dataset_dict(folder):
    saved_to_disk(folder / "train", ROWS[:40])
    saved_to_disk(folder / "test", ROWS[35:50])
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train", "test"]}))
    return folder


def plain_folder(folder):
    parquet(folder / "data" / "train-00000-of-00001.parquet", ROWS[:40])
    jsonl(folder / "data" / "test.jsonl", ROWS[35:50])
    (folder / "README.md").write_text("# Nothing is said here\n")
    return folder


@pytest.mark.parametrize(
    ("made", "parameters"), [(hub_folder, {"config": "main"}), (dataset_dict, {}), (plain_folder, {})]
)
def test_data_splits_in_the_files_are_used_and_missing_ones_are_taken_from_training_rows_by_hash(
    made, parameters, tmp_path
):
    splits = by_split(made(tmp_path / "set"), **parameters)
    assert splits[Split.HELD_OUT] == {row["prompt"] for row in ROWS[35:50]}
    assert splits[Split.TRAIN] | splits[Split.VALIDATION] == {row["prompt"] for row in ROWS[:35]}
    assert 0 < len(splits[Split.VALIDATION]) < 12


def test_names_of_data_splits_are_configurable_and_an_explicit_held_out_path_takes_precedence(tmp_path):
    folder = tmp_path / "set"
    for name, rows in (("train_sft", ROWS[:30]), ("test_sft", ROWS[30:40]), ("train_prefs", ROWS[40:])):
        saved_to_disk(folder / name, rows)
    (folder / "dataset_dict.json").write_text(json.dumps({"splits": ["train_sft", "test_sft", "train_prefs"]}))
    with pytest.raises(RecipeError, match=r"parameters\.split must name one of the splits train_sft, test_sft, train_"):
        opened(folder)
    with pytest.raises(RecipeError, match=r"parameters\.split: there is no split 'train'; available: train_sft, test_"):
        opened(folder, split="train")
    splits = by_split(folder, split="train_sft", held_out_split="test_sft")
    assert splits[Split.HELD_OUT] == {row["prompt"] for row in ROWS[30:40]}
    assert splits[Split.TRAIN] | splits[Split.VALIDATION] == {row["prompt"] for row in ROWS[:30]}
    own = str(jsonl(tmp_path / "own.jsonl", ROWS[3:5]))
    splits = by_split(folder, split="train_sft", held_out_path=own)
    assert splits[Split.HELD_OUT] == {row["prompt"] for row in ROWS[3:5]}


def test_recipe_must_name_one_of_several_configurations_of_a_hub_data_set_without_a_default(tmp_path):
    folder = hub_folder(tmp_path / "set")
    with pytest.raises(RecipeError, match="has several configurations; name one as config: main, hard"):
        opened(folder)
    with pytest.raises(RecipeError, match="has no configuration 'zzz': main, hard"):
        opened(folder, config="zzz")
    assert questions(opened(folder, config="hard")) <= {row["prompt"] for row in ROWS[50:]}
    (folder / "README.md").write_text(README.replace("config_name: hard", "config_name: hard\n  default: true"))
    assert questions(opened(folder)) <= {row["prompt"] for row in ROWS[50:]}
    (folder / "README.md").write_text(README.replace("main/train-*.parquet", "../secret.parquet"))
    with pytest.raises(RecipeError, match=r"README\.md must name only files of its folder, got '\.\./secret\.parquet'"):
        opened(folder, config="main")


def game(count, *, first=0, prompt="Play the game."):
    """Return rows of tasks that share their prompt and answer."""
    numbers = range(first, first + count)
    return [{"prompt": prompt, "answer": "x", "uid": f"u{n}", "metadata": {"seed": n}} for n in numbers]


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("parameters", [{}, {"id_field": "uid", "metadata_fields": []}])
def test_tasks_that_share_a_prompt_are_different_problems(write, parameters, tmp_path):
    held_out = jsonl(tmp_path / "held.jsonl", game(2, prompt="Another game."))
    path = write(tmp_path / ("a.jsonl" if write is jsonl else "a.parquet"), [*game(300), *game(3)])
    files = {"held_out_path": str(held_out), "validation_path": str(held_out), **parameters}
    source = opened(path, **files)
    assert len(source) == len({problem.problem_id for problem in problems(source)}) == 300
    assert source.summary == "303 rows read: 300 train problems, 3 dropped as duplicates of another row"
    again = opened(path, **files)
    assert problems(again) == problems(source)


def test_training_row_with_the_prompt_of_a_held_out_row_is_dropped_and_counted(tmp_path):
    train, held_out = jsonl(tmp_path / "a.jsonl", ROWS), jsonl(tmp_path / "b.jsonl", [{**ROWS[3], "answer": "other"}])
    source = opened(train, held_out_path=str(held_out), validation_path=str(held_out))
    assert ROWS[3]["prompt"] not in questions(source)
    assert source.summary == (
        "60 rows read: 59 train problems, 1 dropped because a row of validation or held-out files has their prompt"
    )
    assert opened(train, held_out_path=str(held_out)).summary.endswith("to other splits by the hash of their prompt")


def test_tasks_are_separated_instead_of_prompts_if_the_recipe_says_so(tmp_path):
    train, held_out = jsonl(tmp_path / "a.jsonl", game(300)), parquet(tmp_path / "b.parquet", game(20, first=290))
    with pytest.raises(RecipeError, match=r'is empty \(300 rows read: 0 train .*\); .*or set split_by = "task"'):
        opened(train, held_out_path=str(held_out))

    def seeds(split, **files):
        return {problem.metadata["seed"] for problem in problems(opened(train, split, split_by="task", **files))}

    of_splits = [seeds(split) for split in Split]
    assert sorted(itertools.chain(*of_splits)) == list(range(300)) and min(map(len, of_splits)) > 10
    files = {"held_out_path": str(held_out), "validation_path": str(held_out)}
    assert seeds(Split.TRAIN, **files) == set(range(290)) and seeds(Split.HELD_OUT, **files) == set(range(290, 310))
    with pytest.raises(RecipeError, match="split_by must be prompt or task, got 'x'"):
        opened(train, split_by="x")


# --- columns ---------------------------------------------------------------------------------------------------------


def problems_of(path, **parameters):
    """Return all problems of a file, in the order of their prompts. Raises `RecipeError` for a refused row."""
    found = []
    for split in Split:
        try:
            found += problems(opened(path, split, **parameters))
        except RecipeError as error:
            if "is empty" not in str(error):
                raise
    return sorted(found, key=lambda problem: problem.messages[0].content)


def one(path, **parameters):
    (problem,) = problems_of(path, **parameters)
    return problem


NESTED = {
    "chat": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
    "reward_model": {"ground_truth": "7", "style": "rule"},
    "level": 3,
    "subject": "algebra",
    "unit": "m-1",
}


@pytest.mark.parametrize(("name", "write"), [("a.parquet", parquet), ("a.jsonl", jsonl)])
def test_data_fields_are_mapped_and_a_dot_selects_a_field_of_a_struct(name, write, tmp_path):
    problem = one(
        write(tmp_path / name, [NESTED]),
        messages_field="chat",
        answer_field="reward_model.ground_truth",
        metadata_fields=["level", "reward_model.style", "absent"],
        tag_fields=["subject", "level", "absent"],
        id_field="unit",
    )
    assert problem == Problem(
        problem_id="d:m-1",
        domain="d",
        messages=(Message("system", "s"), Message("user", "u")),
        ground_truth="7",
        metadata={"level": 3, "reward_model.style": "rule"},
        tags=("subject=algebra", "level=3"),
    )


def test_null_fields_that_arrow_adds_to_structs_are_removed_from_the_data(tmp_path):
    rows = [
        {"prompt": "a", "answer": "1", "metadata": {"tests": [{"stdin": "x"}, {"argv": ["y"]}]}},
        {"prompt": "b", "answer": "2", "metadata": {"level": 2}},
    ]
    path = parquet(tmp_path / "a.parquet", rows)
    assert pq.read_table(path).to_pylist()[1]["metadata"] == {"tests": None, "level": 2}, "arrow adds fields"
    assert [problem.metadata for problem in problems_of(path)] == [row["metadata"] for row in rows]


@pytest.mark.parametrize("write", [parquet, jsonl])
def test_answer_field_that_names_the_conversation_takes_its_last_message(write, tmp_path):
    turns = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]
    path = write(tmp_path / ("a.parquet" if write is parquet else "a.jsonl"), [{"chat": turns}])
    problem = one(path, messages_field="chat", answer_field="chat")
    assert ([each.content for each in problem.messages], problem.ground_truth) == (["2 + 2?"], "4")
    for field, value in (("prompt", "2 + 2?"), ("messages", turns[:1]), ("messages", turns[1:])):
        path = jsonl(tmp_path / "b.jsonl", [{field: value}])
        with pytest.raises(RecipeError, match=f"field '{field}' must end with the answer"):
            opened(path, answer_field=field)


@pytest.mark.parametrize(
    ("row", "parameters", "sentence"),
    [
        ({"q": "a"}, {}, 'field "prompt" is missing or null; the row has '),
        ({"prompt": "a", "answer": None}, {}, 'field "answer" is missing or null; the row has '),
        ({"prompt": "a"}, {"id_field": "key"}, 'field "key" is missing or null; the row has '),
        ({"prompt": " \t\n\u3000"}, {}, 'field "prompt" is empty'),
        ({"messages": [{"role": "user", "content": " "}]}, {}, 'field "messages" is empty'),
        ({"messages": []}, {}, "field 'messages' must be a text, or mess"),
        ({"messages": [{"role": "bot", "content": "x"}]}, {}, "field 'messages' must be a text, or mess"),
        ({"messages": [{"role": "assistant", "content": "y"}]}, {}, "field 'messages' ends with the assistant's"),
    ],
)
@pytest.mark.parametrize(
    ("name", "write", "place"),
    [("a.parquet", parquet, "row 2"), ("a.jsonl", jsonl, "line 3"), ("a.json", json_array, "row 2")],
)
def test_invalid_field_error_names_row_and_field(name, write, place, row, parameters, sentence, tmp_path):
    messages = [{"role": "user", "content": "fine"}]
    good = {"prompt": None, "messages": messages, "answer": "1", "key": "k"}
    bad = dict.fromkeys(good) | {"answer": "1"} | row
    path = write(tmp_path / name, [good, {**good, "messages": None, "prompt": "more"}, bad])
    with pytest.raises(RecipeError, match=f"{name} {place}: {sentence}"):
        opened(path, **parameters)


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.jsonl", '{"prompt": "a", "answer": "b"}\n{"prompt"', r"a\.jsonl line 2: .* got invalid JSON"),
        ("a.jsonl", "\n[1, 2]\n", r"a\.jsonl line 2: expected an object with fields, got '\[1, 2\]'"),
        ("a.json", '[{"prompt": ', r"a\.json is not valid JSON"),
        ("a.csv", "prompt,answer\na,b\nc\n", r"a\.csv row 1: expected the 2 fields of the first line"),
        ("a.parquet", "PAR1 not", r"a\.parquet cannot be read"),
        ("a.arrow", "not", r"a\.arrow cannot be read"),
        ("a.txt", "x", r"a\.txt has an unknown format; known are \.jsonl"),
        ("a.jsonl.gz", "x", r"a\.jsonl\.gz cannot be read"),
        ("a.jsonl", "\n\n", "the train split of its files is empty"),
    ],
)
def test_damaged_file_error_names_the_file(name, text, sentence, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(RecipeError, match=sentence):
        opened(tmp_path / name)


@pytest.mark.parametrize(
    ("parameters", "sentence"),
    [
        ({"path": 3}, "parameters.path must be the path of a file or folder, or a list, got 3"),
        ({"path": "/no/such/*.parquet"}, "got '/no/such/\\*.parquet', which does not exist"),
        ({"path": "a.jsonl", "zzz": 1}, "unknown zzz; known: path, validation_path"),
        ({"path": "a.jsonl", "answer_field": 1}, "parameters.answer_field must be the name of a field, got 1"),
        ({"path": "a.jsonl", "tag_fields": "level"}, "parameters.tag_fields must be a list of field names"),
        ({"path": "a.jsonl", "config": "main"}, "config applies only to a folder in the hub's layout"),
        ({}, "parameters.path must be the path of a file or folder, got None"),
    ],
)
def test_invalid_parameter_error_names_the_parameter(parameters, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "a.jsonl")
    with pytest.raises(RecipeError, match=sentence):
        open_source("files", domain="d", split=Split.TRAIN, seed=0, parameters=parameters)


def test_digest_of_a_data_row_is_the_same_on_the_fast_path_as_after_mapping_its_fields():
    columns = FieldMap(prompt_field="prompt")
    indexed = index_of(RowSequence(ROWS, "rows"), columns)
    assert columns.plain_prompt
    assert [digest.tobytes() for digest in indexed.digests] == [digest_of(columns.text(row)) for row in ROWS]


def test_changed_data_file_is_read_again(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", ROWS[:30])
    before = len(opened(path))
    jsonl(path)
    assert len(opened(path)) > before
