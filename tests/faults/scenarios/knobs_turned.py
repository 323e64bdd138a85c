"""Knobs change many times a second on a live run of two engines: the run always takes its next step.

The recipe is that of `make run`. At random intervals the staleness bounds j and k change, and sometimes groups in
flight and rollouts per step, so that limits fall while the pipeline is full and rise while it is empty. Each step must
follow within `STALL_S` seconds.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from typing import Any, Final

from pipelinerl.controller.client import ControllerClient
from pipelinerl.rng import generator
from tests.fakes.live_run import launched
from tests.faults.scenarios.scenario import Verdict

SHORT = range(1)
LONG = range(20)

STORM_S: Final = 120.0
STALL_S: Final = 30.0
_LONGEST_STARTUP_S: Final = 240.0
_K: Final = (1, 2, 3, 5, 8, 16, 32)
_GROUP_SIZE: Final = 8


def play(seed, directory, *, storm_s=STORM_S):
    draw, path = generator(seed, "knobs turned"), directory / "run"
    arguments = ["tiny", "engine.count=2", "run.steps=1000000", f"run.directory={directory}", "run.name=run"]
    figures: Counter[str] = Counter({"steps": 0, "changes": 0, "stalls": 0})
    with launched(arguments, path) as run:
        run.until_step(1, timeout_s=_LONGEST_STARTUP_S)
        endpoint = json.loads((path / "controller.json").read_text())
        with ControllerClient(endpoint["url"], endpoint["token"], who="knobs_turned") as client:
            broken = _storm(run, client, draw, figures, storm_s)
            steps = len(run.steps())
            figures["steps"] = steps
            if not broken and not _steps_on(run, beyond=steps + 2):
                broken = [_stall(run, client, "after the last change")]
    figures["stalls"] = len(broken)
    return Verdict(figures, tuple(broken))


def _storm(run, client, draw, figures, storm_s):
    """Change knobs for `storm_s` seconds or until the run stalls; return a sentence on the stall."""
    ends_at = time.monotonic() + storm_s
    steps, stepped_at = 0, time.monotonic()
    while (now := time.monotonic()) < ends_at:
        if len(run.steps()) > steps:
            steps, stepped_at = len(run.steps()), now
        if now - stepped_at > STALL_S:
            return [_stall(run, client, f"after {figures['changes']} changes")]
        k = int(draw.choice(_K))
        changes: dict[str, Any] = {"j": int(draw.integers(1, k + 1)), "k": k}
        if draw.random() < 0.2:
            changes["groups_in_flight"] = int(draw.integers(4, 129))
        if draw.random() < 0.2:
            changes["rollouts_per_step"] = int(draw.integers(32, 513)) // _GROUP_SIZE * _GROUP_SIZE
        client.change_knobs(changes)
        figures["changes"] += 1
        time.sleep(float(draw.uniform(0.05, 1.2)))
    return []


def _steps_on(run, *, beyond):
    deadline = time.monotonic() + STALL_S
    while time.monotonic() < deadline:
        if len(run.steps()) > beyond:
            return True
        time.sleep(0.1)
    return False


def _stall(run, client, when):
    status = client.status()
    waits = f"{when} no step came for {STALL_S:g} s at step {status.step}; the run waits for {status.waiting_for}"
    return f"{waits}\n{run.story()}"
