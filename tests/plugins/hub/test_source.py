"""Tests of the source `hub:<id>`: offline, it reads the cache; without a cache, it fails with a one-sentence error."""

import json
import os
import subprocess
import sys

import pytest

from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.problems import look_at, open_source
from pipelinerl.data.source import SourceRequest, Split
from pipelinerl.errors import RecipeError
from tests.data.files.test_source import ROWS, WRITERS, jsonl, parquet
from tests.patience import PATIENCE_S

OPEN = """
import sys
from pipelinerl.data.problems import Split, open_source
from pipelinerl.errors import RecipeError
try:
    source = open_source("hub:some/thing", domain="d", split=Split.HELD_OUT, seed=0, parameters={})
    print(sorted(source.problem(index).messages[0].content for index in range(len(source))))
except RecipeError as error:
    print(error)
"""


LOOK = """
from pipelinerl.data.source import Split
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.problems import look_at
from pipelinerl.data.source import SourceRequest
seen = []
request = SourceRequest(domain="d", split=Split.TRAIN, seed=0)
first = look_at("hub:some/thing", request, FirstRows(9, 2**20), seen.append)
print(first and first.messages[0].content, len(seen))
"""


def output_of(cache, program=OPEN):
    """Run a program in a new process, as the hub's library reads HF_HUB_OFFLINE only at import; return its output."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    command = [sys.executable, "-c", program]
    return subprocess.check_output(
        command, env=environment, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
    ).strip()


def test_cached_data_set_of_the_hub_is_read_as_a_folder(tmp_path):
    commit = "0" * 40
    repository = tmp_path / "hub" / "datasets--some--thing"
    parquet(repository / "snapshots" / commit / "data" / "train-00000-of-00001.parquet", ROWS[:40])
    parquet(repository / "snapshots" / commit / "data" / "test-00000-of-00001.parquet", ROWS[40:])
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    assert output_of(tmp_path) == str(sorted(row["prompt"] for row in ROWS[40:]))
    assert output_of(tmp_path, LOOK) == f"{ROWS[0]['prompt']} 18", "nine rows of each file"


def test_check_before_a_run_fetches_nothing_from_the_hub(tmp_path):
    assert output_of(tmp_path, LOOK) == "None 0"


def test_failed_fetch_from_the_hub_is_reported_in_one_sentence(tmp_path):
    output = output_of(tmp_path)
    assert output.startswith("domains.d.source: hub:some/thing cannot be fetched from here, and is not in the cache (")
    assert 'set source = "files" with its path' in output and "\n" not in output


@pytest.mark.parametrize(
    ("source", "parameters", "sentence"),
    [
        ("hub", {}, "must be hub:<id of a data set>, without parameters.path"),
        ("hub:a/b", {"path": "x"}, "must be hub:<id of a data set>, without parameters.path"),
        ("hub:a/b", {"revision": 3}, "parameters.revision must be a branch, tag or commit, got 3"),
        ("hub:a b", {}, "domains.d.source: Repo id must"),
    ],
)
def test_invalid_reference_to_a_hub_data_set_is_rejected(source, parameters, sentence):
    with pytest.raises(RecipeError, match=sentence):
        open_source(source, domain="d", split=Split.TRAIN, seed=0, parameters=parameters)


MEBIBYTE = 2**20


def looked_at(path, rows, *, size=MEBIBYTE, refuse="", **parameters):
    """Check the first rows of a data file, as before a run; return their questions. Question `refuse` is rejected."""
    seen = []

    def check(problem):
        if problem.messages[-1].content == refuse:
            raise RecipeError("no verifier can judge it")
        seen.append(problem.messages[-1].content)

    request = SourceRequest(domain="d", split=Split.TRAIN, seed=0, parameters={"path": str(path), **parameters})
    first = look_at("files", request, FirstRows(rows, size), check)
    assert first is None or first.messages[-1].content == seen[0]
    return seen


@pytest.mark.parametrize("name", WRITERS)
def test_check_of_a_data_set_before_a_run_reads_only_the_requested_number_of_rows(name, tmp_path):
    path = WRITERS[name](tmp_path / name)
    questions = [row["prompt"] for row in ROWS]
    each = 10 if name != "saved" else 5  # the data set `saved` has two files; 5 rows of each are read
    expected = questions[:10] if name != "saved" else questions[:5] + questions[25:30]
    assert looked_at(path, each) == expected
    assert looked_at(path, 1000) == questions
    with pytest.raises(RecipeError, match=r"a?\S* (row \d+|line 4): no verifier can judge it"):
        looked_at(path, 1000, refuse=questions[3])


def test_check_of_a_data_file_stops_at_the_last_complete_line_within_the_byte_limit(tmp_path):
    path = jsonl(tmp_path / "a.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    third_half_read = len(lines[0] + lines[1]) + len(lines[2]) // 2
    assert len(looked_at(path, 1000, size=third_half_read)) == 2
    assert looked_at(path, 1000, size=5) == []


def test_invalid_data_row_gives_the_same_error_in_the_check_before_a_run_as_in_the_run(tmp_path):
    path = jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": "a", "answer": "b", "metadata": "c"}])
    with pytest.raises(RecipeError, match=r"a\.jsonl line 61: field 'metadata' must be an object, got 'c'"):
        looked_at(path, 1000)
    assert len(looked_at(path, 60)) == 60
    path.write_text(json.dumps({"prompt": "a", "answer": "b", "rate": 2}))
    with pytest.raises(RecipeError, match=r"a\.jsonl line 1: field 'rate' must be a pass rate"):
        looked_at(path, 10, rate_field="rate", order="easy_first")
