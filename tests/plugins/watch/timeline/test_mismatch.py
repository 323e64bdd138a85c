"""`pipelinerl mismatch` on a run's event log: tables, advice, picture, JSON, and errors."""

import json
import re

import numpy as np
import pytest
from typer.testing import CliRunner

from pipelinerl.cli import app
from pipelinerl.errors import UserError
from pipelinerl.numerics.causes import figures, sampled_tokens
from pipelinerl.observability.events import EventLog
from tests.numerics.test_causes import HELD, micro_batch, random_rollouts


def a_run(directory, *, steps):
    """Write a run directory whose step events have the mismatch metrics of random rollouts."""
    with EventLog(directory / "events.jsonl") as log:
        log.write("run_started", elapsed_s=0.0, run="r")
        for number in range(1, steps + 1):
            batch, logprobs = micro_batch(random_rollouts(number, 12))
            sampled = sampled_tokens([batch], [logprobs])
            assert sampled is not None
            cuts = {name: np.zeros(len(sampled.logprobs), bool) for name in ("clipped", "truncated", "masked")}
            log.write("step", step=number, ess=0.9, **figures(sampled, held_version=HELD, cuts=cuts))
    return directory


def printed_by(*arguments):
    result = CliRunner().invoke(app, ["mismatch", *arguments], env={"COLUMNS": "160"})
    if isinstance(result.exception, UserError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_mismatch_command_prints_tables_advice_and_json_and_writes_a_picture(tmp_path):
    output = printed_by(str(a_run(tmp_path, steps=12)))
    for expected in ("current − behavior, 12 steps", "old − behavior", "numerics", "cache", "staleness", "5–8"):
        assert expected in output
    assert re.search(r"own version differ by 0\.\d+ at P95", output) and "because" in output
    assert (tmp_path / "mismatch.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads(printed_by(str(tmp_path), "--json"))
    assert record["steps"] == 12 and record["current"].keys() == {"numerics", "cache", "staleness"}
    assert record["current"]["staleness"]["figures"]["p95"].keys() >= {"start", "middle", "end", "worst", "worst_step"}
    assert record["advice"][0].keys() == {"finding", "do", "because"}


def test_mismatch_command_rejects_a_run_without_events_or_without_mismatch_metrics(tmp_path):
    with pytest.raises(UserError, match=r"no readable events\.jsonl"):
        printed_by(str(tmp_path / "nowhere"))
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(UserError, match="no events yet"):
        printed_by(str(tmp_path))
    with EventLog(tmp_path / "events.jsonl") as log:
        log.write("step", step=1, reward=0.5)
    with pytest.raises(UserError, match="1 steps, none with mismatch figures"):
        printed_by(str(tmp_path))
