"""`pipelinerl compare`: results of runs side by side, and the settings in which they differ."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from pipelinerl.cli import app
from tests.plugins.watch.run_files import written_run


def test_compare_shows_results_and_only_settings_that_differ(tmp_path: Path) -> None:
    one = written_run(tmp_path / "one", steps=3)
    two = written_run(tmp_path / "two", steps=4, overrides=["staleness.k=5"])
    result = CliRunner().invoke(app, ["compare", str(one), str(two)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    by_name = {name: values for name, *values in rows}
    assert [value.split()[0] for value in by_name["steps"]] == ["3", "4"]
    assert by_name["staleness.k"][1] == "5" and "sampling.temperature" not in by_name


def test_compare_of_a_single_run_is_rejected(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert "compare needs two runs or more" in str(result.exception)
