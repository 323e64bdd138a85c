"""Charts of optimizer steps: each lies within its step, and a run without has none."""

from __future__ import annotations

from typing import Any

from pipelinerl.observability.run_history import tell
from pipelinerl.observability.updates import update_charts


def step(number: int, *updates: dict[str, float]) -> dict[str, Any]:
    event = {"kind": "step", "time": 0.0, "elapsed_s": float(number), "step": number}
    return event | ({"updates": list(updates), "optimizer_steps": float(len(updates))} if updates else {})


def test_each_optimizer_step_lies_within_its_step() -> None:
    events = [
        step(1, {"kl_old": 0.0, "clip_fraction": 0.1}, {"kl_old": 0.5, "clip_fraction": 0.2}),
        step(2, {"clip_fraction": 0.3}),
    ]
    kl, clipped, made = [chart.lines[0].series for _, chart in update_charts(tell(events))]
    assert (kl.x, kl.y) == ((0.5, 1.0), (0.0, 0.5))
    assert (clipped.x, clipped.y) == ((0.5, 1.0, 2.0), (0.1, 0.2, 0.3))
    assert made.y == (2.0, 1.0)


def test_a_run_of_one_optimizer_step_a_batch_has_no_such_chart() -> None:
    assert not any(line.series for _, chart in update_charts(tell([step(1), step(2)])) for line in chart.lines)
