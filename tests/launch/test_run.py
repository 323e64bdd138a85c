"""The launcher's last message is about the launch that just ended, whatever earlier launches have recorded."""

from io import StringIO

import pytest
from rich.console import Console

from launch.run import record_failure, show_end
from launch.run_directory import RunDirectory
from launch.supervisor import RunOutcome, RunResult
from pipelinerl.commands.remote import address_of
from pipelinerl.config.recipe import load, write_layout
from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventLog, read_events

BEGUN = {"kind": "run_started", "run": "tiny", "knobs": {}, "elapsed_s": 0.0}
TRAINED = {"kind": "trainer_ready", "epoch": 1, "elapsed_s": 1.0}


@pytest.mark.parametrize(("events", "advised"), [([], False), ([BEGUN], False), ([BEGUN, TRAINED], True)])
def test_launcher_does_not_advise_to_resume_a_run_that_failed_before_its_trainer_was_ready(tmp_path, events, advised):
    """Resuming such a run would fail again, for example because of the same damaged checkpoints."""
    console = Console(file=StringIO(), width=200)
    refused = RunResult(RunOutcome.FAILED, "controller ended (exit status 2): no checkpoint is whole")
    show_end(refused, RunDirectory(tmp_path, load("tiny")), events, console)
    output = console.file.getvalue()
    assert ("--resume" in output) is advised
    assert output.endswith("failed: controller ended (exit status 2): no checkpoint is whole\n")


def test_reason_of_a_failed_run_is_shown_by_later_commands_although_its_controller_could_not_record_it(tmp_path):
    directory = RunDirectory(tmp_path, load("tiny"))
    (tmp_path / "recipe.toml").write_text("")
    write_layout(tmp_path)
    with EventLog(directory.events) as log:
        log.write("run_started", run="tiny", knobs={}, elapsed_s=0.0)
    failed = RunResult(RunOutcome.FAILED, "engine-0 ended (killed by SIGKILL) after 3 restarts; its log a ends:\nb")
    for _ in range(2):  # a controller that wrote its own reason is not contradicted
        record_failure(failed, directory, read_events(directory.events))
        assert [event["kind"] for event in read_events(directory.events)] == ["run_started", "run_failed"]
    with pytest.raises(UserError, match=r"it has ended \(engine-0 ended \(killed by SIGKILL\) after 3 restarts\)"):
        address_of(tmp_path)
