"""`pipelinerl compare`: results of runs side by side, and the settings in which they differ."""

from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.observability.usage import Usage, write_usage
from tests.plugins.watch.run_files import written_run


def test_compare_shows_results_and_only_settings_that_differ(tmp_path):
    one = written_run(tmp_path / "one", steps=3)
    two = written_run(tmp_path / "two", steps=4, overrides=["staleness.k=5"])
    result = CliRunner().invoke(app, ["compare", str(one), str(two)], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.output.splitlines() if "│" in line]
    by_name = {name: values for name, *values in rows}
    assert [value.split()[0] for value in by_name["steps"]] == ["3", "4"]
    assert by_name["staleness.k"][1] == "5" and "sampling.temperature" not in by_name


def test_runs_of_a_folder_are_listed_and_compared_with_their_held_out_curves_and_time(tmp_path):
    written_run(tmp_path / "one", steps=3)
    written_run(tmp_path / "two", steps=4, end=False)
    write_usage(tmp_path / "one", "engine-0", Usage(60.0, 30.0))
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)], env={"COLUMNS": "200"}).output
    assert [line.split("│")[2].strip() for line in listed.splitlines() if str(tmp_path) in line] == [
        "crashed",
        "finished",
    ]
    compared = CliRunner().invoke(app, ["compare", str(tmp_path)], env={"COLUMNS": "300"}).output
    for part in ("held_out over the run", "▁", "engine 60", "GPU seconds", "engine 30"):
        assert part in compared, part
    empty = CliRunner().invoke(app, ["runs", str(tmp_path / "one")])
    assert "holds no runs" in str(empty.exception)
    single = CliRunner().invoke(app, ["compare", str(tmp_path / "one")])
    assert "compare needs two runs or more" in str(single.exception)
