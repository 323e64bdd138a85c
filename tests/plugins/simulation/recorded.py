"""Synthetic run events with known durations, from which a calibration should recover these durations."""

from __future__ import annotations

import random
from typing import Any

from pipelinerl.observability.events import Event
from pipelinerl.plugins.simulation.hardware import EngineTimes


def run_events(
    *,
    steps: int = 30,
    period_s: float = 2.0,
    compute_s: float = 0.5,
    publish_wait_s: float = 0.1,
    report_s: float = 0.02,
    rollouts: int = 64,
    tokens_by_step: list[int] | None = None,
    token_s: float | None = None,
    engine: EngineTimes | None = None,
) -> list[Event]:
    """Return the events of a run with a step every `period_s`, and engine counters that follow from `engine`."""
    draw = random.Random(0)
    decode_steps = rows = prompts = 0
    busy_s = 0.0
    events: list[Event] = [_event("run_started", 0.0, run="recorded")]
    for step in range(1, steps + 1):
        at, tokens = 10.0 + step * period_s, (tokens_by_step or [2000] * steps)[step - 1]
        computed = compute_s if token_s is None else token_s * tokens
        if engine is not None:
            made, batch = draw.randint(20, 90), draw.randint(1, 64)
            decode_steps, rows, prompts = decode_steps + made, rows + made * batch, prompts + draw.randint(0, 900)
            busy_s = engine.step_s * decode_steps + engine.row_s * rows + engine.prompt_token_s * prompts
            counters = {"decode_steps": decode_steps, "row_steps": rows, "prompt_tokens": prompts, "busy_s": busy_s}
            events.append(_event("engines", at - 0.1, **counters))
        step_s = computed + publish_wait_s
        fields: dict[str, Any] = {
            "step": step, "model_version": step, "rollouts": float(rollouts), "tokens": float(tokens),
            "sampled_tokens": tokens * 0.75, "wait_s": period_s - step_s - report_s, "step_s": step_s,
            "publish_wait_s": publish_wait_s, "staleness_mean": 2.0, "stale_tokens": 100.0 * step,
            "stages": [[step, at - 1, at - 0.7, at - 0.65, "http://engine", []]],
        }  # fmt: skip
        events.append(_event("step", at, **fields))
        events.append(_event("publish", at + 0.05, model_version=step, total_s=0.06, send_s=0.05, pause_s=0.01))
    return events


def _event(kind: str, at: float, **fields: Any) -> Event:
    return {"time": 1.7e9 + at, "kind": kind, "elapsed_s": at, **fields}
