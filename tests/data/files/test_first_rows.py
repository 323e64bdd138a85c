"""Checks of a file's first rows: exactly the requested number, in every format, with errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.data.drafts import Split
from pipelinerl.data.files.rows import FirstRows
from pipelinerl.data.problems import look_at
from pipelinerl.data.prompts import Prompts
from pipelinerl.data.source import SourceRequest
from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem
from tests.data.files.test_source import ROWS, WRITERS, jsonl

MEBIBYTE = 2**20


def looked_at(path: Path, rows: int, *, size: int = MEBIBYTE, refuse: str = "", **parameters: Any) -> list[str]:
    """Return the questions that were checked; the check rejects the question `refuse`."""
    seen: list[str] = []

    def check(problem: Problem) -> None:
        if problem.messages[-1].content == refuse:
            raise RecipeError("nobody could judge it")
        seen.append(problem.messages[-1].content)

    asked = SourceRequest(domain="d", split=Split.TRAIN, seed=0, parameters={"path": str(path), **parameters})
    first = look_at("files", asked, FirstRows(rows, size), check)
    assert first is None or first.messages[-1].content == seen[0]
    return seen


@pytest.mark.parametrize("name", WRITERS)
def test_only_the_requested_number_of_rows_is_checked(name: str, tmp_path: Path) -> None:
    path = WRITERS[name](tmp_path / name)
    questions = [row["prompt"] for row in ROWS]
    each = 10 if name != "saved" else 5  # rows from each of two files
    expected = questions[:10] if name != "saved" else questions[:5] + questions[25:30]
    assert looked_at(path, each) == expected
    assert looked_at(path, 1000) == questions
    with pytest.raises(RecipeError, match=r"a?\S* (row \d+|line 4): nobody could judge it"):
        looked_at(path, 1000, refuse=questions[3])


def test_check_stops_at_the_last_complete_line_within_the_byte_limit(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    third_half_read = len(lines[0] + lines[1]) + len(lines[2]) // 2
    assert len(looked_at(path, 1000, size=third_half_read)) == 2
    assert looked_at(path, 1000, size=5) == []


def test_invalid_row_gives_the_same_error_as_in_a_run(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", [*ROWS, {"prompt": "a", "answer": "b", "metadata": "c"}])
    with pytest.raises(RecipeError, match=r"a\.jsonl line 61: field 'metadata' must be an object, got 'c'"):
        looked_at(path, 1000)
    assert len(looked_at(path, 60)) == 60
    path.write_text(json.dumps({"prompt": "a", "answer": "b", "rate": 2}))
    with pytest.raises(RecipeError, match=r"a\.jsonl line 1: field 'rate' must be a pass rate"):
        looked_at(path, 10, rate_field="rate", order="easy_first")


def test_problems_of_generators_are_checked_before_a_run() -> None:
    seen: list[Problem] = []
    asked = SourceRequest(domain="d", split=Split.TRAIN, seed=0, parameters={"max_digits": 1}, prompts=Prompts())
    assert look_at("addition", asked, FirstRows(100, MEBIBYTE), seen.append) == seen[0]
    assert len(seen) == 2
