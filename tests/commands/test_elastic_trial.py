"""`pipelinerl engines elastic` shows the scaling decisions that a rule would have made in a recorded run."""

import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.config.recipe import load, save
from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventLog

URL = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """Return a run of two minutes with one busy engine, for which the trainer waits half of the first minute only."""
    directory = tmp_path_factory.mktemp("run")
    save(load("tiny", ["elastic.types.torch.max=2"]), directory / "recipe.toml")
    with EventLog(directory / "events.jsonl") as log:
        log.write("engine_verified", elapsed_s=0.5, url=URL)
        for second in range(1, 121):
            wait_s = 0.5 if second <= 60 else 0.0
            log.write("step", elapsed_s=second, step=second, wait_s=wait_s, step_s=1 - wait_s)
            log.write("engines", elapsed_s=second, occupancy=0.9 if second <= 60 else 0.2)
            if second == 70:
                log.write("engine_verified", elapsed_s=70, url=f"{URL}0")
    return directory


def printed_by(run_dir, *overrides):
    result = CliRunner().invoke(app, ["engines", "elastic", str(run_dir), *overrides])
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_elastic_trial_on_a_recorded_run_prints_each_scaling_decision_with_time_and_reason(run_dir):
    *decided, note = printed_by(run_dir)
    assert [line.partition(":")[0].split() for line in decided] == [
        ["33", "s", "step", "33", "1", "→", "2", "engines"],
        ["99", "s", "step", "99", "2", "→", "1", "engines"],
    ]
    assert "the engines are 90% busy, the trainer waits 50% of its time" in decided[0]
    assert "only the first decision is reliable" in note


def test_elastic_trial_on_a_recorded_run_applies_command_line_overrides(run_dir):
    assert printed_by(run_dir, "elastic.waiting=0.6", "elastic.content=0.001", "elastic.types.torch.min=1")[:-1] != []
    (nothing,) = printed_by(run_dir, "elastic.waiting=0.6", "elastic.patience=9")
    assert nothing == "no decision in 242 events: no 9 intervals of 10 s in a row agree"


def test_elastic_trial_rejects_a_directory_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="so it is not a run"):
        printed_by(tmp_path)
