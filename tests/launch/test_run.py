"""The launcher's last message describes this launch, whatever earlier launches recorded."""

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
def test_run_that_never_trained_is_not_advised_to_resume(
    tmp_path: Path, events: list[dict[str, object]], advised: bool
) -> None:
    """A resumed run would fail again, for example with the same damaged checkpoints."""
    console = Console(file=StringIO(), width=200)
    refused = RunResult(RunOutcome.FAILED, "controller ended (exit status 2): no checkpoint is whole")
    show_end(refused, RunDirectory(tmp_path, load("tiny")), events, console)
    said = console.file.getvalue()
    assert ("--resume" in said) is advised
    assert said.endswith("failed: controller ended (exit status 2): no checkpoint is whole\n")
