"""The launcher's last message is about the launch that just ended, whatever earlier launches have recorded."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from launch.run import show_end
from launch.run_directory import RunDirectory
from launch.supervisor import RunOutcome, RunResult
from pipelinerl.config.recipe import load

BEGUN = {"kind": "run_started", "run": "tiny", "knobs": {}, "elapsed_s": 0.0}
TRAINED = {"kind": "trainer_ready", "epoch": 1, "elapsed_s": 1.0}


@pytest.mark.parametrize(("events", "advised"), [([], False), ([BEGUN], False), ([BEGUN, TRAINED], True)])
def test_launcher_does_not_advise_to_resume_a_run_that_failed_before_its_trainer_was_ready(
    tmp_path: Path, events: list[dict[str, object]], advised: bool
) -> None:
    """Resuming such a run would fail again, for example because of the same damaged checkpoints."""
    console = Console(file=StringIO(), width=200)
    refused = RunResult(RunOutcome.FAILED, "controller ended (exit status 2): no checkpoint is whole")
    show_end(refused, RunDirectory(tmp_path, load("tiny")), events, console)
    output = console.file.getvalue()
    assert ("--resume" in output) is advised
    assert output.endswith("failed: controller ended (exit status 2): no checkpoint is whole\n")
