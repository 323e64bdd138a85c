"""Compare the lag that `staleness.mode = "auto"` chooses with fixed settings, in real runs.

    auto                  j and the lag are chosen on the live run, and with shared cores also turns
    on policy             (1, 1): sample, train, publish, in turn, each part with one core
    on policy, all cores  the same, each part with all cores
    one off               (1, 2), the setting of `tiny`
    fixed j, k            (1, 8): k bounds the staleness, and the run chooses the lag within it

`--recipe` takes another recipe than `tiny`, and `--steps` its number of steps. With `--recipe heavy_tailed`, `tiny`
gets words of heavy-tailed lengths, as in `schedules`. With `--recipe compute_bound`, the compute of a random decoder of
310 MB dominates. It hardly learns, so that the answers of all arms are equally long.

Learning curves of few seeds are too noisy to compare settings, so the figures are the mean seconds of a step after the
first third of the run, and the lag. With lag, short steps alternate with long ones, so that a median shows neither. A
ratio compares the arms of one seed, which run one after the other. Where all arms reach a reward of 0.7 or 0.85, with
`--steps 1000` say, the table has the steps and seconds that they take to it, by the version that sampled the answers.
`--only` runs some of the arms.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.arms import Column, Figures, FinishedRun, Job, by_arm, measured, steps_of, table, training_clock
from benchmarks.schedules import Cell
from pipelinerl.plugins.warmstart.tiny_decoder import DebugSize, char_tokenizer, random_decoder
from pipelinerl.types import Problem

RECIPE: Final = "tiny"
#: The recipe `compute_bound`, without the path of its model.
_COMPUTE_BOUND: Final = """
base = "tiny"
run.name = "compute_bound"
engine = { slots = 16, context_length = 64 }
sampling.max_tokens = 24
training.rollouts_per_step = 16
optimizer.learning_rate = 1e-9
[[domains]]
name = "vowels"
source = "reasoning_gym:spell_backward"
verifier = "benchmarks.chosen_lag:vowels"
"""
#: Overrides of the recipe's keys, by arm.
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "auto": ("staleness.mode=auto",),
    "on policy": ("staleness.mode=on_policy",),
    "on policy, all cores": ("staleness.mode=on_policy", f"launch.threads={len(os.sched_getaffinity(0))}"),
    "one off": ("staleness.mode=one_step_off",),
    "fixed j, k": ("staleness.j=1", "staleness.k=8"),
}
TARGETS: Final = (0.7, 0.85)
COLUMNS: Final = (
    Column("s/step", "step_s", ".3f"),
    Column("÷ auto", "step_s ÷ auto", ".3f"),
    Column("staleness", "age", ".2f"),
    Column("reward at the end", "reward", ".3f"),
)


def run(
    quick: bool = False,
    *,
    seeds: Sequence[int] = (0, 1, 2),
    recipe: str = RECIPE,
    steps: int | None = None,
    only: Sequence[str] = tuple(ARMS),
) -> None:
    """Train every arm of `only` and auto with every seed, print a table and, unless `quick`, record the results."""
    cell, steps, name = f"{steps} steps" if steps else "", steps or (30 if quick else 150), Path(recipe).stem
    changes: tuple[str, ...] = (f"run.steps={steps}", f"evaluation.interval_steps={steps}", "evaluation.problems=16")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-chosen-lag-") as folder:
        path = recipe
        if recipe == "compute_bound":
            path = str(compute_bound(Path(folder)))
        elif recipe == "heavy_tailed":
            path, changes = RECIPE, (*changes, *Cell(recipe=RECIPE, lengths="heavy-tailed", optimizer_steps=0).changes)
        arms = {arm: own for arm, own in ARMS.items() if arm in {"auto", *only}}
        jobs = [Job(arm, seed, path, (*changes, *own), cell) for seed in seeds for arm, own in arms.items()]
        record = "chosen_lag" if recipe == RECIPE else f"chosen_lag_{name}"
        runs = measured(record, jobs, _figures, quick=quick, judged=False)
    auto = {row["seed"]: row for row in by_arm(runs)["auto"]}
    keys = ["step_s", *(key for target in TARGETS for key in (f"steps to {target}", f"seconds to {target}"))]
    keys = [key for key in keys if None not in (row[key] for row in runs)]
    rows = [row | {f"{key} ÷ auto": row[key] / auto[row["seed"]][key] for key in keys} for row in runs]
    columns = [*COLUMNS, *(Column(f"{key} ÷ auto", f"{key} ÷ auto", ".3f") for key in keys[1:])]
    print(f"\nchosen lag: {name}, {steps} steps; mean over the seeds [lowest, highest]\n{table(rows, columns)}")


def compute_bound(folder: Path) -> Path:
    """Write the recipe `compute_bound` and its model into `folder`; return the recipe's path."""
    random_decoder(DebugSize.MB_310).save_pretrained(folder / "model")
    char_tokenizer().save_pretrained(str(folder / "model"), save_jinja_files=False)
    recipe = folder / "compute_bound.toml"
    recipe.write_text(f'model.path = "{folder / "model"}"{_COMPUTE_BOUND}')
    return recipe


def vowels(problem: Problem, text: str) -> float:
    """Return the share of the answer's characters that are vowels."""
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def _figures(job: Job, run: FinishedRun) -> Figures:
    clock, ages = training_clock(run.history), steps_of(run.history, "staleness_mean").y
    start, rewards = len(clock) // 3, run.history.by_sampling_version().smoothed()
    reached = {
        target: next(
            (round(version) for version, reward in zip(rewards.x, rewards.y, strict=True) if reward >= target), None
        )
        for target in TARGETS
    }
    seconds = (0.0, *clock)  # by the version that is made then
    return {
        **{f"steps to {target}": version for target, version in reached.items()},
        **{f"seconds to {target}": version and seconds[version] for target, version in reached.items()},
        "completed": run.completed,
        "step_s": (clock[-1] - clock[start]) / (len(clock) - 1 - start),
        "age": fmean(ages[start:]),
        "reward": run.history.last_reward or 0.0,
    }
