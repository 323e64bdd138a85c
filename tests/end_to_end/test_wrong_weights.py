"""An engine that serves other weights than those that arrived is caught at its first wrong version, by name."""

import os
import subprocess
import sys

import pytest

from pipelinerl.observability.events import read_events
from tests.fakes import wrong_weights
from tests.patience import PATIENCE_S

FIRST = 8
INT8, BFLOAT16 = ("engine.weights=int8",), ("engine.dtype=bfloat16", "weights.dtype=bfloat16")
#: Faults of the weights, with keys of the recipe. The trainer has no replica of this engine, whose type is a file's.
OF_WEIGHTS = [
    *((fault, ()) for fault in ("frozen", "zeroed", "one", "norms", "layers", "half")),
    ("zeroed", INT8),
    ("layers", BFLOAT16),
]


def events_of(directory, fault, keys):
    command = [sys.executable, "-m", "pipelinerl", "run", "tiny", "run.steps=24", "evaluation.interval_steps=24"]
    command += ["engine.count=2", f"engine.type={wrong_weights.__file__}:from_options", *keys]
    faulty = os.environ | {"WRONG_WEIGHTS": fault, "WRONG_UPDATES": f"{FIRST} {FIRST + 3}"}
    done = subprocess.run(command, cwd=directory, env=faulty, capture_output=True, text=True, timeout=5 * PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    events = read_events(directory / "runs" / "tiny" / "events.jsonl")
    assert events[-1]["kind"] == "run_finished"
    failures = [each for each in events if each["kind"] == "engine_canary_failed"]
    assert len({each["url"] for each in failures}) == 1, "one engine is wrong"
    return events, failures


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "keys"), OF_WEIGHTS)
def test_engine_with_wrong_weights_after_an_update_is_caught_before_a_step_trains_on_them(tmp_path, fault, keys):
    _, (caught, *_) = events_of(tmp_path, fault, keys)
    assert caught["model_version"] == FIRST - 1, "the first update is version 0"


@pytest.mark.slow
def test_engine_that_reports_shifted_log_probs_never_serves(tmp_path):
    events, failures = events_of(tmp_path, "shifted", ())
    verified = {each["url"] for each in events if each["kind"] == "engine_verified"}
    assert verified and failures[0]["url"] not in verified
