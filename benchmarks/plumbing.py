"""What of a run's processor time goes to parts that neither sample nor train: `make run`'s recipe, once it has begun.

Windows of a hundred steps each, of all processes that the run has started: the engine and the trainer, whole, with
their HTTP and their streams; and the rest, which is plumbing: actor, controller, stream server, verifiers, launcher.
The model is the smallest there is, so that no run spends a larger share on plumbing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.live_recipe import LiveRecipe, live_recipe
from benchmarks.measure import Row, bootstrap_median, print_table, write_record
from pipelinerl.config.recipe import load

_COMPUTES: Final = ("engine", "trainer")
_MOST: Final = 0.15
_ACTOR_MS: Final = 0.2
_STEPS: Final = 100
_DEADLINE_S: Final = 600.0


def run(quick: bool = False) -> None:
    """Measure, print, record."""
    steps, count = (20, 2) if quick else (_STEPS, 9)
    with tempfile.TemporaryDirectory(prefix="plumbing-") as name, live_recipe(Path(name), learned=50) as live:
        windows = [_window(live, steps) for _ in range(count)]
    spent = [each for each, _ in windows]
    parts = sorted({part for each in spent for part in each}, key=lambda part: -spent[0].get(part, 0.0))
    shares = {part: bootstrap_median([each.get(part, 0.0) / sum(each.values()) for each in spent]) for part in parts}
    plumbing = bootstrap_median([1 - sum(each[part] for part in _COMPUTES) / sum(each.values()) for each in spent])
    actor = bootstrap_median([1e3 * each["actor"] / rollouts for each, rollouts in windows])
    rows = [Row(f"{part}: share of the run's processor time", share) for part, share in shares.items()]
    rows.append(Row("plumbing, all but engine and trainer", plumbing, f"<= {_MOST}", plumbing.median <= _MOST))
    rows.append(Row("actor, ms of a processor for each rollout", actor, f"<= {_ACTOR_MS}", actor.median <= _ACTOR_MS))
    print_table("where a run's processor time goes", rows)
    payload: dict[str, Any] = {"quick": quick, "plumbing": plumbing.as_dict(), "actor_ms": actor.as_dict()}
    write_record("plumbing", payload | {"shares": {part: share.as_dict() for part, share in shares.items()}})


def _window(live: LiveRecipe, steps: int) -> tuple[dict[str, float], int]:
    """Processor seconds of each part while the run takes so many steps, and the rollouts that it trained in them."""
    live.read()
    before, first, deadline = live.processor_s_by_part(), len(live.steps), time.monotonic() + _DEADLINE_S
    while len(live.steps) - first < steps:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the run took fewer than {steps} steps in {_DEADLINE_S:g} s")
        time.sleep(0.25)
        live.read()
    after, taken = live.processor_s_by_part(), len(live.steps) - first
    spent = {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}
    return spent, taken * load("tiny").training.rollouts_per_step


if __name__ == "__main__":
    run()
