"""An engine that serves other weights than those that arrived is caught at its first wrong version, by name."""

import os
import subprocess
import sys

import pytest

from pipelinerl.observability.events import read_events
from tests.fakes import wrong_weights
from tests.patience import PATIENCE_S

FIRST = 8


@pytest.mark.slow
@pytest.mark.parametrize("fault", wrong_weights.IN_RUNS)
def test_engine_with_wrong_weights_after_an_update_is_caught_before_a_step_trains_on_them(tmp_path, fault):
    command = [sys.executable, "-m", "pipelinerl", "run", "tiny", "run.steps=24", "evaluation.interval_steps=24"]
    command += ["engine.count=2", f"engine.type={wrong_weights.__file__}:from_options"]
    faulty = os.environ | {"WRONG_WEIGHTS": fault, "WRONG_UPDATES": f"{FIRST} {FIRST + 3}"}
    done = subprocess.run(command, cwd=tmp_path, env=faulty, capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(tmp_path / "runs" / "tiny" / "events.jsonl")
    caught, *_ = [each for each in events if each["kind"] == "engine_canary_failed"]
    assert caught["model_version"] == FIRST - 1, "the first update is version 0"
    assert not [each for each in events if each["kind"] == "engine_canary_failed" and each["url"] != caught["url"]]
    assert events[-1]["kind"] == "run_finished"
