"""The table by domain and tag: weighted means, shares of groups, and runs without such figures."""

from __future__ import annotations

from typing import Any

import pytest

from pipelinerl.observability.domains import DOMAIN_HEAD, domain_charts, domain_rows, episode_rows, mean_of
from pipelinerl.observability.progress import domain_lines
from pipelinerl.observability.report import render
from pipelinerl.observability.run_history import RunHistory, tell
from pipelinerl.observability.status import LastStepStatus, RunStatus
from tests.observability.synthetic import events


def history(*steps: dict[str, Any]) -> RunHistory:
    return tell([{"kind": "step", "step": number, "elapsed_s": 1.0, **step} for number, step in enumerate(steps, 1)])


def test_means_are_weighted_by_rollouts() -> None:
    words = {"rollouts": 30, "reward": 1.0, "reward.format": 0.5, "accuracy": 1.0, "groups": 3, "stale_groups": 1}
    seldom = {"rollouts": 10, "reward": 0.0, "accuracy": 0.0, "groups": 4, "stale_groups": 0, "verifier_s": 0.004,
              "verified": 10, "verifier_errors": 2}  # fmt: skip
    made = history(
        {"by_domain": {"words": words}}, {"by_domain": {"words": seldom, "<sums>": {}}, "by_tag": {"t": words}}
    )
    rows = {row[0]: dict(zip(DOMAIN_HEAD, row, strict=True)) for row in domain_rows(made)}
    assert list(rows) == ["<sums>", "words", "t"]
    assert rows["words"] | {
        "rollouts": "40", "reward": "0.750, format 0.500", "right": "75.0%", "stale": "12.5%",
        "verifier": "4 ms, 2 errors"
    } == rows["words"]  # fmt: skip
    assert rows["<sums>"]["reward"] == "–" and rows["<sums>"]["stale"] == "–"
    assert "&lt;sums&gt;" in render(made, "") and "<sums>" not in render(made, "")


def test_charts_have_a_line_per_domain() -> None:
    words = {"accuracy": 0.5, "reward": 0.75}
    steps = [{"by_domain": {"a": words, "b": {"accuracy": None}}, "entropy": 1.0}, {"by_domain": {}}]
    charts = dict(domain_charts(history(*steps)))
    lines = {line.label: line.series for line in charts["Accuracy by domain"].lines}
    assert lines["a"].y == (0.5,) and not lines["b"]
    assert [line.series.y for line in charts["Reward by domain, smoothed"].lines if line.series] == [(0.75,)]
    assert charts["Entropy, nats per token"].lines[0].series.y == (1.0,)


def test_run_without_domains_has_no_rows() -> None:
    assert domain_rows(tell(events(3))) == [] and "No step was taken." in render(tell([]), "")


def test_mean_of_nothing_is_none() -> None:
    assert mean_of([], "reward") is None and mean_of([{"reward": 1.0}], "reward") is None
    assert mean_of([{"reward": 1.0, "rollouts": 1}, {"reward": 4.0, "rollouts": 2}], "reward") == pytest.approx(3.0)


def test_control_characters_in_tags_are_escaped() -> None:
    evil = "level=\x1b[2J\u202e\n3"
    step = LastStepStatus(by_tag={evil: {"reward": 1.0, "reward.\x07": 1.0}})
    assert domain_lines(RunStatus(run="r", last_step=step)) == [
        "tag level=\\x1b[2J\\u202e\\n3: reward 1.000 · \\x07 1.000"
    ]
    ((name, _, reward, *_),) = domain_rows(history({"by_tag": step.by_tag}))
    assert name == "level=\\x1b[2J\\u202e\\n3" and reward == "–, \\x07 –"


def test_episodes_have_a_row_per_domain_with_their_calls() -> None:
    game = {"turns": 2.0, "segments": 1.5, "rollouts": 10, "episodes": 4, "environment_s": 0.5, "calls_parsed": 3}
    later = game | {"turns": 4.0, "tool_errors": 2, "calls_malformed": 1, "episodes": 12, "environment_s": 1.5}
    steps = ({"by_domain": {"game": game, "sums": {"rollouts": 5}}}, {"by_domain": {"game": later}})
    assert episode_rows(history(*steps)) == [("game", "3", "1.5", "1.25", "6", "2", "1")]
    assert "seconds outside the model" in render(history(*steps), "")
    assert "seconds outside the model" not in render(history({"by_domain": {"sums": {"rollouts": 5}}}), "")
