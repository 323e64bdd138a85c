"""The table of predicted memory in docs/understand/trainers.md is what `check` predicts today."""

from __future__ import annotations

from pathlib import Path

from benchmarks import model_sizes

DOCS = Path(__file__).parents[2] / "docs" / "understand" / "trainers.md"


def test_the_table_of_the_docs_is_what_is_predicted() -> None:
    assert "\n".join(model_sizes.lines()) in DOCS.read_text()
