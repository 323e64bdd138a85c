"""Compare conventional RL, with G optimizer steps per generation, with the asynchronous schedules.

In a schedule (j, k), an engine's weights are at most j versions old, and a trained token at most k.

    conventional G   generate G batches, then take G optimizer steps; all cores generate, then all train
    one step off     (j, k) = (1, 2): the engine samples the next batch while the trainer trains on the previous one
    drain            (j, k) = (1, 8), and running answers finish on old weights before an update
    RLAX             (j, k) = (16, 32): a publication every sixteenth step
    in flight        (j, k) = (1, 8), and running answers continue with new weights: PipelineRL

All arms (schedules) share code, prompts, noise, objective and rollouts per optimizer step. Every arm runs with every
seed in every cell (a distribution of answer lengths). Before that, trials with a separate seed choose each arm's
learning rate (half, once or twice the recipe's) by the mean reward. For conventional RL they also choose the fastest
use of the cores: one thread per process, a thread per core, or an engine per core. Targets: `in flight` reaches a
reward in at most 0.6 of the seconds of the best conventional arm with fixed lengths, 0.45 with heavy tails. `--recipe`
takes a task whose compute dominates, such as `examples/smollm2/json_facts.toml`. An interrupted benchmark resumes run
by run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.arms import (
    PICTURES,
    Column,
    Figures,
    FinishedRun,
    Job,
    by_arm,
    figures_of,
    measured,
    panels,
    recorded,
    steps_of,
    table,
)
from benchmarks.measure import RESULTS, bootstrap_median
from pipelinerl.config.recipe import load

RECIPE: Final = "tiny"
GENERATIONS: Final = (1, 2, 4, 8)
_CONVENTIONAL: Final = tuple(f"conventional G = {g}" for g in GENERATIONS)
#: Rewards for which the time to reach them is reported, of the tiny recipe and of others.
_TARGETS: Final = (0.6, 0.7)
_OTHER_TARGETS: Final = (0.7, 0.9)
_ASYNCHRONOUS: Final[Mapping[str, tuple[str, ...]]] = {
    "one step off": ("staleness.j=1", "staleness.k=2"),
    "drain": ("staleness.j=1", "staleness.k=8", "engine.on_update=drain"),
    "RLAX (16, 32)": ("staleness.j=16", "staleness.k=32"),
    "in flight": ("staleness.j=1", "staleness.k=8", "engine.on_update=continue"),
}
#: Words to spell, by distribution of lengths: for each domain the fewest and most letters of a word, and its weight.
_WORDS: Final[Mapping[str, tuple[tuple[int, int, float], ...]]] = {
    "fixed": ((5, 5, 1.0),),
    "heavy-tailed": ((3, 3, 6.0), (5, 6, 2.0), (10, 12, 1.0)),
}
#: Few held-out problems, since the held-out split has few distinct words of three letters.
_HELD_OUT: Final = "evaluation.problems=96"
#: Factors of the recipe's learning rate that trials compare, and how conventional RL may use all cores.
RATES: Final = (0.5, 1.0, 2.0)
_CORES: Final = len(os.sched_getaffinity(0))
PARALLEL: Final = ("launch.threads=1", f"launch.threads={_CORES}", f"engine.count={_CORES}")
#: The seed of trials; a trial's number of steps as a share of a full run's; its least number of generations.
_TRIAL_SEED: Final = 1000
_TRIAL_STEPS: Final = 0.4
_TRIAL_GENERATIONS: Final = 3
_TRIALS: Final = ("_cores", "_rates")
_COLOURS: Final = ("#9aa3b2", "#6b7486", "#454c5a", "#1f2430", "#f2a541", "#18a999", "#8f5bd6", "#2f6fed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A task and a distribution of answer lengths, shared by all arms of a comparison."""

    recipe: str
    lengths: str
    optimizer_steps: int

    @property
    def name(self) -> str:
        """The cell's name in tables."""
        return f"{Path(self.recipe).stem}, {self.lengths}"

    @property
    def changes(self) -> tuple[str, ...]:
        """The overrides of the recipe's keys for this cell."""
        if self.lengths not in _WORDS:
            return ()
        domains = ", ".join(
            f'{{ name = "words_{low}", source = "reasoning_gym:spell_backward", verifier = "reasoning_gym", '
            f"weight = {weight}, parameters = {{ min_word_len = {low}, max_word_len = {high}, "
            'answer_pattern = "[a-z]+" } }'
            for low, high, weight in _WORDS[self.lengths]
        )
        return (f"domains=[{domains}]", "sampling.max_tokens=16", "engine.context_length=48", _HELD_OUT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An arm: its overrides of recipe keys, and the optimizer steps per generation (1 if asynchronous)."""

    name: str
    keys: tuple[str, ...]
    generation: int = 1

    @property
    def conventional(self) -> bool:
        """True if generation and training take turns."""
        return "staleness.k=1" in self.keys

    def changes(self, cell: Cell, *, share: float = 1.0) -> tuple[str, ...]:
        """Return this arm's overrides of recipe keys, in addition to the cell's; `share` scales the number of steps.

        Asynchronous arms run engine and trainer at the same time, so each process has one thread.
        """
        recipe = load(cell.recipe)
        rollouts, threads = recipe.training.rollouts_per_step, recipe.launch.threads
        least = 1 if share == 1.0 else _TRIAL_GENERATIONS
        steps = max(least, round(cell.optimizer_steps * share) // self.generation)
        return (
            f"training.rollouts_per_step={rollouts * self.generation}",
            f"training.mini_batches={self.generation}",
            f"run.steps={steps}",
            f"evaluation.interval_steps={steps}",
            f"checkpoint.interval_steps={steps}",
            *self.keys,
            *(() if self.conventional or threads == 1 else ("launch.threads=1",)),
        )


COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("reward at the end", "reward", ".3f"),
    Column("mean reward by samples", "area", ".3f"),
    Column("seconds", "seconds", ".0f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
    Column("engine busy", "engine_busy", ".0%"),
    Column("trainer busy", "trainer_busy", ".0%"),
    Column("lag", "lag", ".1f"),
    Column("discarded", "discarded", ".1%"),
    Column("ESS", "ess", ".3f"),
    Column("others' processor time", "others", ".0%"),
)


def targets_of(recipe: str) -> tuple[float, ...]:
    """Return the rewards for which the time to reach them is reported."""
    return _TARGETS if recipe == RECIPE else _OTHER_TARGETS


def schedules() -> list[Schedule]:
    """Return all schedules to compare: the conventional ones first, then the asynchronous ones."""
    synchronous = ("staleness.j=1", "staleness.k=1")
    conventional = [
        Schedule(name=name, keys=synchronous, generation=g) for name, g in zip(_CONVENTIONAL, GENERATIONS, strict=True)
    ]
    return [*conventional, *(Schedule(name=name, keys=keys) for name, keys in _ASYNCHRONOUS.items())]


def figures(job: Job, run: FinishedRun) -> Figures:
    """Return the results of `figures_of`, seconds to each target reward (None: not reached), lag, and busy times.

    `lag` is the mean number of optimizer steps between the weights that sampled a rollout's oldest token and the step
    that trained it. `trainer_busy` is the share of training time that steps take. `engine_s` and `compute_s` are the
    seconds in which the engines had rows and in which the trainer computed.
    """
    row = figures_of(job, run)
    engine_s = run.history.series(run.history.engines, "busy_s").y
    several = next(each.generation for each in schedules() if each.name == job.arm)
    seconds, rewards = row["by_seconds"]
    for target in targets_of(job.recipe):
        reached = (at for at, reward in zip(seconds, rewards, strict=True) if reward >= target)
        row[f"seconds_to_{target}"] = next(reached, None)
    return row | {
        "lag": (row["age"] - 1) * several + (several + 1) / 2,
        "engine_busy": run.history.median(run.history.engines, "occupancy"),
        "trainer_busy": sum(steps_of(run.history, "step_s").y) / row["seconds"],
        "engine_s": engine_s[-1] - engine_s[0] if engine_s else 0.0,
        "compute_s": sum(steps_of(run.history, "step_s").y) - sum(run.history.by_step("publish_wait_s").y),
    }


def bounds(runs: Sequence[Figures]) -> Mapping[str, Any]:
    """Return, by cell and asynchronous arm, the seconds of all steps ÷ those of the fastest conventional arm, bounded.

    With engine and trainer on a core each, no schedule is faster than the busier of the two: that is the bound. `share`
    is the share of the possible gain that the arm has reached. Medians over the seeds; runs that were recorded before
    busy times were are left out.
    """
    found: dict[str, dict[str, Any]] = {}
    timed = [row for row in runs if row.get("engine_s")]
    for cell in dict.fromkeys(row["cell"] for row in timed):
        arms = by_arm([row for row in timed if row["cell"] == cell])
        seconds = {name: median(row["seconds"] for row in rows) for name, rows in arms.items()}
        fastest = min((at for name, at in seconds.items() if name in _CONVENTIONAL), default=None)
        for name, rows in arms.items() if fastest else ():
            if name not in _CONVENTIONAL:
                bound = median(max(row["engine_s"], row["compute_s"]) for row in rows) / fastest
                ratio = seconds[name] / fastest
                found.setdefault(cell, {})[name] = {"ratio": ratio, "bound": bound, "share": (1 - ratio) / (1 - bound)}
    return {"bounds": found}


def ratios(runs: Sequence[Figures]) -> Mapping[str, Any]:
    """Return each asynchronous arm's seconds to a target reward, divided by those of the best conventional arm.

    The result has a table per cell and target reward. The best conventional arm is that with the smallest median time.
    Ratios are paired by seed: a table holds their median with its interval. An arm that missed the reward with any seed
    has no ratio.
    """
    found: dict[str, Any] = {}
    cells_of_runs = {row["cell"]: targets_of(row["recipe"]) for row in runs}
    for cell, target in [(cell, target) for cell, targets in cells_of_runs.items() for target in targets]:
        seconds = {
            name: {row["seed"]: row[f"seconds_to_{target}"] for row in rows}
            for name, rows in by_arm([row for row in runs if row["cell"] == cell]).items()
        }
        whole = {name: times for name, times in seconds.items() if None not in times.values()}
        conventional = {name: median(times.values()) for name, times in whole.items() if name in _CONVENTIONAL}
        if not conventional:
            continue
        best = min(conventional, key=lambda name: conventional[name])
        paired = {
            name: [at / whole[best][seed] for seed, at in times.items() if seed in whole[best]]
            for name, times in whole.items()
            if name not in _CONVENTIONAL
        }
        found[f"{cell}, reward {target}"] = {"best conventional": best} | {
            name: bootstrap_median(ratios).as_dict() for name, ratios in paired.items() if ratios
        }
    return {"seconds_over_best_conventional": found}


def cells(*, quick: bool, recipe: str) -> list[Cell]:
    """Return the cells to run; a recipe other than `tiny` has one cell, with its own answer lengths and steps."""
    if recipe != RECIPE:
        return [Cell(recipe=recipe, lengths="as the recipe", optimizer_steps=load(recipe).run.steps)]
    laws = ("heavy-tailed",) if quick else tuple(_WORDS)
    return [Cell(recipe=recipe, lengths=law, optimizer_steps=8 if quick else 400) for law in laws]


@dataclass(frozen=True, slots=True)
class Trials:
    """Short runs, with a seed of their own, that select overrides for each arm and cell: those of highest `merit`."""

    name: str
    candidates: Mapping[tuple[Cell, Schedule], Sequence[tuple[str, ...]]]
    merit: Callable[[Figures], float]

    def best(self) -> dict[tuple[Cell, Schedule], tuple[str, ...]]:
        """Run every trial that is not recorded yet; return, for each arm and cell, the overrides of highest `merit`."""
        jobs = {
            place: [self._job(*place, changes) for changes in several] for place, several in self.candidates.items()
        }
        rows = iter(
            measured(
                self.name,
                [job for each in jobs.values() for job in each],
                figures,
                quick=False,
                judged=False,
                repeats=False,
            )
        )
        merits = {place: [self.merit(next(rows)) for _ in several] for place, several in jobs.items()}
        return {place: self.candidates[place][each.index(max(each))] for place, each in merits.items()}

    @staticmethod
    def _job(cell: Cell, arm: Schedule, changes: tuple[str, ...]) -> Job:
        keys = (*cell.changes, *arm.changes(cell, share=_TRIAL_STEPS), *changes)
        return Job(arm.name, _TRIAL_SEED, cell.recipe, keys, cell.name)


def chosen(name: str, grid: Sequence[Cell], arms: Sequence[Schedule]) -> dict[tuple[Cell, Schedule], tuple[str, ...]]:
    """Return the overrides that trials choose for each arm: conventional RL's use of cores, and the learning rate."""
    places = list(product(grid, arms))
    ways = {place: [(each,) for each in PARALLEL] for place in places if place[1].conventional}
    cores = Trials(f"{name}_cores", ways, lambda row: -row["seconds"]).best()
    rates = {
        (cell, arm): [
            (*cores.get((cell, arm), ()), f"optimizer.learning_rate={_rate(cell) * factor:g}") for factor in RATES
        ]
        for cell, arm in places
    }
    return Trials(f"{name}_rates", rates, lambda row: row["area"]).best()


def _rate(cell: Cell) -> float:
    rate = load(cell.recipe).optimizer.learning_rate
    if rate is None:
        raise ValueError(f"{cell.recipe} has no optimizer.learning_rate for the trials to vary; set it")
    return rate


def run(
    quick: bool = False,
    *,
    recipe: str = RECIPE,
    changes: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int | None = None,
    only: Sequence[str] = (),
) -> None:
    """Choose the overrides of each arm (or those in `only`) by trials, then train it in every cell with every seed."""
    grid = [replace(cell, optimizer_steps=steps or cell.optimizer_steps) for cell in cells(quick=quick, recipe=recipe)]
    arms = schedules()[:: len(GENERATIONS) + 3] if quick else schedules()
    arms = [arm for arm in arms if not only or arm.name in only]
    name = f"schedules_{Path(recipe).stem}"
    keys = {} if quick else chosen(name, grid, arms)
    jobs = [
        Job(
            arm.name, seed, recipe, (*cell.changes, *arm.changes(cell), *keys.get((cell, arm), ()), *changes), cell.name
        )
        for seed, cell, arm in product(seeds[: 1 if quick else None], grid, arms)
    ]
    runs = measured(name, jobs, figures, quick=quick, summary=lambda rows: {**ratios(rows), **bounds(rows)})
    for cell, arms_of in bounds(runs)["bounds"].items():
        for name, each in arms_of.items():
            print(f"{cell}, {name}: {each['ratio']:.2f}, at best {each['bound']:.2f}: {each['share']:.0%} of the gain")
    for cell in grid:
        rows = [row for row in runs if row["cell"] == cell.name]
        times = [Column(f"seconds to {target}", f"seconds_to_{target}", ".1f") for target in targets_of(cell.recipe)]
        print(f"\nschedules: {cell.name}; mean over the seeds [lowest, highest]\n{table(rows, (*times, *COLUMNS))}")


def plot(path: Path = PICTURES / "schedules.png") -> Path:
    """Draw the training reward over seconds of every arm and cell: the mean over the seeds, and their range."""
    records = [
        recorded(each.stem) for each in sorted(RESULTS.glob("schedules_*.json")) if not each.stem.endswith(_TRIALS)
    ]
    rows = [row for record in records for row in record]
    rows.sort(key=lambda row: row["recipe"] != RECIPE)
    cells_of_rows = list(dict.fromkeys(row["cell"] for row in rows))
    colours = dict(zip([each.name for each in schedules()], _COLOURS, strict=True))

    def draw(axes: Sequence[Any]) -> None:
        for panel, cell in zip(axes, cells_of_rows, strict=False):
            for name, runs in by_arm([row for row in rows if row["cell"] == cell]).items():
                seconds = np.linspace(0, min(row["by_seconds"][0][-1] for row in runs), 200)
                rewards = [np.interp(seconds, *row["by_seconds"]) for row in runs]
                panel.plot(seconds, np.mean(rewards, axis=0), color=colours[name], linewidth=1.6, label=name)
                low, high = np.min(rewards, axis=0), np.max(rewards, axis=0)
                panel.fill_between(seconds, low, high, color=colours[name], alpha=0.12, linewidth=0)
            panel.set(title=cell, xlabel="seconds of training", ylabel="training reward")
            panel.legend(frameon=False, fontsize=8)
        for panel in axes[len(cells_of_rows) :]:
            panel.set_visible(False)

    return panels(path, draw, lines=-(-len(cells_of_rows) // 2))
