"""Events of an invented run, deterministic and plausible, for tests of charts."""

from __future__ import annotations

import math
from typing import Any

from pipelinerl.rng import generator


def events(steps: int = 300) -> list[dict[str, Any]]:
    """Return the events of a run of `steps` steps whose reward rises."""
    noise = generator(7, "synthetic-run")
    made: list[dict[str, Any]] = []

    def add(kind: str, elapsed_s: float, **fields: Any) -> None:
        made.append({"time": 1.76e9 + elapsed_s, "kind": kind, "elapsed_s": elapsed_s, **fields})

    add("run_started", 0.0, run="tiny", total_steps=steps)
    add("engine_joined", 0.4, url="http://127.0.0.1:4001")
    for step in range(steps + 1):
        at = 2.0 + step * 0.9
        skill = 0.08 + 0.85 / (1 + math.exp(-(step - 0.4 * steps) / (0.1 * steps)))
        if step % max(1, steps // 12) == 0:
            seen = skill - 0.02 + 0.02 * float(noise.normal())
            add("evaluation", at, model_version=step, accuracy=seen, low=seen - 0.035, high=seen + 0.03, problems=512,
                version_min=step, version_max=step, pin="engine", engine="http://127.0.0.1:4001", samples=4,
                discarded=2, steps_meanwhile=3, pass_at=[
                    {"k": k, "value": min(1.0, seen + 0.02 * k), "low": seen, "high": 1.0, "problems": 512}
                    for k in (1, 4)
                ])  # fmt: skip
        if step == 0:
            continue
        wait = abs(float(noise.normal(0.05, 0.04)))
        add("step", at, step=step, model_version=step, reward=min(1.0, max(0.0, skill + 0.05 * float(noise.normal()))),
            loss=0.02 * float(noise.normal()), grad_norm=0.4 + 0.1 * abs(float(noise.normal())),
            learning_rate=1e-3 * min(1.0, step / 10), rollouts=256, tokens=11000, sampled_tokens=8200,
            staleness_mean=2 + 0.4 * float(noise.normal()), staleness_max=4 + int(noise.integers(0, 3)),
            step_s=0.8 + wait, wait_s=wait, clip_fraction=0.02 + 0.01 * float(noise.random()),
            ess=0.95 - 0.02 * float(noise.random()), mismatch_numerics_p95=2e-6,
            mismatch_staleness_p95=9e-3, lag="lag 2.0: it costs 3%")  # fmt: skip
        pause = 0.0011 + 0.0004 * abs(float(noise.normal())) + (0.004 if step % 97 == 0 else 0)
        add("publish", at + 0.05, model_version=step, send_s=0.02, total_s=0.031, pause_s=pause, engines=1, failed={})
        add(
            "engines", at + 0.1, tokens_per_s=9000 + 500 * float(noise.normal()), occupancy=0.93, running=119, waiting=4
        )
        if step % 100 == 0:
            add("checkpoint", at + 0.2, path=f"checkpoints/step-{step}", model_version=step)
    add("knobs", 0.5 * steps, changes={"staleness.k": 16, "sampling.temperature": 0.9}, who="cli", step=steps // 2)
    add("engine_lost", 0.6 * steps, url="http://127.0.0.1:4001", reason="no answer for 10 s", decision=17)
    add("run_finished", 2.5 + steps * 0.9, reason="all steps taken")
    return made
