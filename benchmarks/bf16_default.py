"""Compare the default of a bfloat16 model with float32: SmolLM2 on `examples/smollm2`, three seeds.

    float32    engine.dtype = "float32", the reference
    default    what a recipe without a word on dtypes does here: float32 engines on a CPU, dithered bfloat16 on a GPU
    dithered   bfloat16 engines, which are sent dithered weights
    nearest    bfloat16 engines, which are sent the plain cast

`python -m benchmarks bf16_default` records each run when it ends and goes on from the record when called again. With
`--quick` one seed of the first two arms. Demanded are at most 10 % more steps to a reward of 0.8 for the default, and a
numerics P95 at its end that is no larger than at its start.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Final

from benchmarks.finished_run import steps_of, train
from benchmarks.measure import RESULTS, Row, print_table, write_record
from benchmarks.trl_smollm2 import EXAMPLE
from pipelinerl.observability.run_history import RunHistory

ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": ("engine.dtype=float32",),
    "default": ("engine.dtype=auto",),
    "dithered": ("engine.dtype=bfloat16", "weights.rounding=dithered"),
    "nearest": ("engine.dtype=bfloat16", "weights.rounding=nearest"),
}
TARGET: Final = 0.8
#: Rewards are means over this many steps.
_WINDOW: Final = 2
_STEPS: Final = 16
_MOST: Final = 1.1
_FETCH_S: Final = 1800.0


def steps_to_target(rewards: Sequence[float]) -> float:
    """Return the step at which the smoothed reward reaches the target, between steps in a straight line."""
    smooth = [fmean(rewards[max(0, place - _WINDOW + 1) : place + 1]) for place in range(len(rewards))]
    for place, reward in enumerate(smooth):
        if reward >= TARGET:
            before = smooth[place - 1] if place else 0.0
            return place + (TARGET - before) / max(reward - before, 1e-9)
    return float("inf")


def outcome(arm: str, seed: int, history: RunHistory) -> dict[str, Any]:
    """Return the figures of a run, for the record."""
    rewards, p95 = steps_of(history, "reward").y, steps_of(history, "mismatch_numerics_p95").y
    tenth = max(1, len(p95) // 10)
    needed = steps_to_target(rewards)
    return {
        "arm": arm,
        "seed": seed,
        "steps_to_target": needed if needed < float("inf") else None,
        "p95_start": fmean(p95[:tenth]),
        "p95_end": fmean(p95[-tenth:]),
        "rewards": list(rewards),
    }


def run(quick: bool = False) -> None:
    """Make what the record lacks, record after each run, print the table."""
    subprocess.run([sys.executable, str(EXAMPLE / "fetch_model.py")], check=True, timeout=_FETCH_S)
    path = RESULTS / "bf16_default.json"
    runs = json.loads(path.read_text())["runs"] if path.exists() and not quick else []
    known = {(each["arm"], each["seed"]) for each in runs}
    for seed in range(1 if quick else 3):
        for arm in list(ARMS)[: 2 if quick else None]:
            if (arm, seed) in known:
                continue
            steps = (
                f"run.steps={_STEPS}",
                f"evaluation.interval_steps={_STEPS}",
                f"checkpoint.interval_steps={_STEPS}",
            )
            done = train(str(EXAMPLE / "json_facts.toml"), [*ARMS[arm], *steps], seed=seed)
            runs.append(outcome(arm, seed, done.history))
            if not quick:
                write_record("bf16_default", {"target": TARGET, "runs": runs})
    print_table("bfloat16 by default, SmolLM2-135M", rows(runs))


def rows(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the table: the bars for the default, and the other arms for comparison."""
    of = {arm: [each for each in runs if each["arm"] == arm] for arm in ARMS}
    means = {arm: fmean(each["steps_to_target"] or _STEPS for each in its) for arm, its in of.items() if its}
    found = []
    for arm, mean in means.items():
        ratio, demanded = mean / means["float32"], arm == "default"
        bar, met = (f"<= {_MOST}", ratio <= _MOST) if demanded else ("", None)
        found.append(Row(f"{arm}: steps to a reward of {TARGET}, ÷ float32", round(ratio, 3), bar, met))
        start, end = (fmean(each[key] for each in of[arm]) for key in ("p95_start", "p95_end"))
        bar, met = ("<= start", end <= start) if demanded else ("", None)
        found.append(Row(f"{arm}: numerics P95, start and end", f"{start:.2g}, {end:.2g}", bar, met))
    return found
