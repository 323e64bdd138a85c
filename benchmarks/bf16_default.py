"""Compare the defaults for a bfloat16 model with float32: SmolLM2 on `examples/smollm2`, three seeds.

    float32    engine.dtype = "float32", the reference
    default    a recipe that names no dtype: float32 engines on a CPU, dithered bfloat16 on a GPU
    dithered   bfloat16 engines that receive dithered weights
    nearest    bfloat16 engines that receive the plain cast

With `--quick`, only the first two arms are run, with one seed. Targets for `default`: at most 10 % more steps than
float32 to a reward of 0.8, and a 95th percentile of the numerical mismatch that does not grow during the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Final

from benchmarks.arms import Figures, FinishedRun, Job, by_arm, measured, steps_of
from benchmarks.measure import Row, print_table
from benchmarks.trl_smollm2 import EXAMPLE, fetch_model

ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "float32": ("engine.dtype=float32",),
    "default": ("engine.dtype=auto",),
    "dithered": ("engine.dtype=bfloat16", "weights.rounding=dithered"),
    "nearest": ("engine.dtype=bfloat16", "weights.rounding=nearest"),
}
TARGET: Final = 0.8
#: Number of steps over which rewards are averaged.
_WINDOW: Final = 2
_STEPS: Final = 16
_MOST: Final = 1.1


def steps_to_target(rewards: Sequence[float]) -> float | None:
    """Return the step at which the smoothed reward reaches the target, interpolated; None if it never does."""
    smooth = [fmean(rewards[max(0, place - _WINDOW + 1) : place + 1]) for place in range(len(rewards))]
    for place, reward in enumerate(smooth):
        if reward >= TARGET:
            before = smooth[place - 1] if place else 0.0
            return place + (TARGET - before) / max(reward - before, 1e-9)
    return None


def figures(_: Job, run: FinishedRun) -> Figures:
    """Return the figures to record for a run: steps to the target, mismatch at the run's start and end, and rewards."""
    rewards, p95 = steps_of(run.history, "reward").y, steps_of(run.history, "mismatch_numerics_p95").y
    tenth = max(1, len(p95) // 10)
    return {
        "completed": run.completed,
        "steps_to_target": steps_to_target(rewards),
        "p95_start": fmean(p95[:tenth]),
        "p95_end": fmean(p95[-tenth:]),
        "rewards": list(rewards),
    }


def run(quick: bool = False, *, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Train every arm with every seed, print a table of the results and, unless `quick`, record them."""
    fetch_model()
    intervals = [f"{key}={_STEPS}" for key in ("run.steps", "evaluation.interval_steps", "checkpoint.interval_steps")]
    jobs = [
        Job(arm, seed, str(EXAMPLE / "json_facts.toml"), (*changes, *intervals))
        for seed in seeds[: 1 if quick else None]
        for arm, changes in list(ARMS.items())[: 2 if quick else None]
    ]
    runs = measured("bf16_default", jobs, figures, quick=quick, judged=False)
    print_table("bfloat16 by default, SmolLM2-135M", rows(runs))


def rows(runs: Sequence[Figures]) -> list[Row]:
    """Return the table's rows: the arm `default` with its targets, and the other arms for comparison."""
    by_name = by_arm(runs)
    means = {arm: fmean(each["steps_to_target"] or _STEPS for each in several) for arm, several in by_name.items()}
    lines = []
    for arm, mean in means.items():
        ratio, judged = mean / means["float32"], arm == "default"
        bar, met = (f"<= {_MOST}", ratio <= _MOST) if judged else ("", None)
        lines.append(Row(f"{arm}: steps to a reward of {TARGET}, ÷ float32", round(ratio, 3), bar, met))
        start, end = (fmean(each[key] for each in by_name[arm]) for key in ("p95_start", "p95_end"))
        bar, met = ("<= start", end <= start) if judged else ("", None)
        lines.append(Row(f"{arm}: numerics P95, start and end", f"{start:.2g}, {end:.2g}", bar, met))
    return lines
