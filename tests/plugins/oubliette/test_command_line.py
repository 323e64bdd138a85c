"""`pipelinerl sandbox run` and `upload`, as a user calls them."""

import json

import pytest
from typer.testing import CliRunner

from pipelinerl.errors import UserError
from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.checkers import CustomChecker
from pipelinerl.plugins.oubliette.code_problem import CodeProblem
from pipelinerl.plugins.oubliette.command_line import oubliette_app
from pipelinerl.plugins.oubliette.repository import Link, PersistentRepository
from pipelinerl.plugins.oubliette.runs import SandboxMissing, Tier
from pipelinerl.types import Problem

LONG = " ".join(map(str, range(60))) + "\n"
ROWS = [
    {"prompt": "double", "tests": [{"input": "1\n", "output": "2\n"}], "time_limit": 2},
    {"prompt": "sum", "public_tests": {"input": [LONG], "output": ["1770"]}, "generated_tests": 3},
    {"prompt": "apps", "input_output": json.dumps({"inputs": [LONG, "1"], "outputs": ["1770", LONG]})},
    {"prompt": "open-r1", "official_tests": [{"input": LONG, "output": "0"}], "generated_checker": "print(1)"},
    {"prompt": "talks", "official_tests": [{"input": "1", "output": "1"}], "interaction_format": "first"},
    {"prompt": "file", "official_tests": [{"input": "1", "output": "1"}], "input_mode": "file"},
    {"prompt": "answered", "answer": json.dumps([{"input": LONG, "output": "1"}])},
]


def invoke(*words):
    result = CliRunner().invoke(oubliette_app, [str(word) for word in words], catch_exceptions=True)
    if isinstance(result.exception, Exception):
        raise result.exception
    return result.exit_code, result.output


@pytest.fixture
def bubblewrap():
    try:
        probe.opened(Tier.DEFAULT, at_once=1).close()
    except SandboxMissing as error:
        pytest.skip(f"left out: programs in the sandbox, since {error}")


def test_oubliette_upload_replaces_test_cases_of_public_data_sets_by_links_to_a_repository(tmp_path):
    """The checker programs in the data are in Python and need no compilation, so the test needs no sandbox."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file, table, out = tmp_path / "problems.jsonl", tmp_path / "table.parquet", tmp_path / "linked.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    pq.write_table(pa.Table.from_pylist(ROWS[:1]), table)
    status, output = invoke("upload", file, table, "--out", out, "--repository", tmp_path / "repository")
    assert status == 0
    assert "6 problems written" in output and "2 problems were left out" in output
    assert "the problem is interactive" in output and "input_mode must be stdio" in output
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == ["double", "sum", "apps", "open-r1", "answered", "double"]
    assert LONG.strip() not in out.read_text()
    repository = PersistentRepository(tmp_path / "repository")
    link = Link.of(LONG.encode())
    assert repository.get(link) == LONG.encode()
    problems = [
        CodeProblem.of(Problem(problem_id="p", domain="d", messages=(), ground_truth="", metadata=row)) for row in rows
    ]
    assert [test.input for problem in problems for test in problem.tests] == [
        b"1\n",
        link,
        link,
        b"1",
        link,
        link,
        b"1\n",
    ]
    assert problems[0].time_limit_s == 2
    checker = problems[3].checker
    assert isinstance(checker, CustomChecker) and isinstance(checker.program, Link)
    assert repository.get(checker.program) == b"print(1)"


def test_oubliette_upload_needs_a_file_of_rows_and_either_a_service_url_or_a_repository(tmp_path):
    for words in ([], ["--url", "http://127.0.0.1:9", "--repository", tmp_path]):
        with pytest.raises(UserError, match="either --url, of a service, or --repository"):
            invoke("upload", tmp_path / "x.jsonl", "--out", tmp_path / "y.jsonl", *words)
    with pytest.raises(UserError, match="must be a file of rows"):
        invoke("upload", tmp_path / "x.txt", "--out", tmp_path / "y.jsonl", "--repository", tmp_path / "r")


def test_oubliette_run_executes_a_program_on_each_of_its_inputs(tmp_path, bubblewrap):
    program, first, second = (tmp_path / name for name in ("double.py", "1", "2"))
    program.write_text("print(2 * int(input()))")
    first.write_text("4")
    second.write_text("5")
    status, output = invoke("run", program, "--input", first, "--input", second)
    assert status == 0
    assert "8\n" in output and "10\n" in output and output.count("default sandbox") == 2
    second.write_text("five")
    status, output = invoke("run", program, "--input", second)
    assert status == 1 and "ValueError" in output
    with pytest.raises(UserError, match="--language must be one of"):
        invoke("run", first)
