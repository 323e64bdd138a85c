"""Compare conventional RL, with G optimizer steps per generation, with the asynchronous schedules.

    conventional G   generate G batches, then take G optimizer steps; all cores generate, then all train
    one step off     (j, k) = (1, 2): the engine samples the next batch while the trainer trains on the last
    drain            (1, 8), and running answers finish on old weights before an update
    RLAX             (16, 32)
    in flight        (1, 8), and running answers continue with new weights: PipelineRL

All arms share code, prompts, noise, objective, number of rollouts, and rollouts per optimizer step. They differ only in
the keys of their schedule. A cell is a law of answer lengths and a number of rollouts per optimizer step; every arm of
every cell runs with every seed. No target is set. Seconds are those of whole runs on an otherwise idle machine.
`--recipe` takes a task whose model is large enough for compute to dominate.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.arms import Column, Figures, FinishedRun, Job, figures_of, measured, table
from benchmarks.measure import bootstrap_median

RECIPE: Final = "tiny"
GENERATIONS: Final = (1, 2, 4, 8)
#: Rewards whose time is reported.
TARGETS: Final = (0.6, 0.7)
_ASYNCHRONOUS: Final[Mapping[str, tuple[str, ...]]] = {
    "one step off": ("staleness.j=1", "staleness.k=2"),
    "drain": ("staleness.j=1", "staleness.k=8", "engine.on_update=drain"),
    "RLAX (16, 32)": ("staleness.j=16", "staleness.k=32"),
    "in flight": ("staleness.j=1", "staleness.k=8", "engine.on_update=continue"),
}
#: Words to spell, by law of lengths: (letters from, to, weight) of each domain.
_WORDS: Final[Mapping[str, tuple[tuple[int, int, float], ...]]] = {
    "fixed": ((5, 5, 1.0),),
    "heavy-tailed": ((3, 3, 6.0), (5, 6, 2.0), (10, 12, 1.0)),
}
#: The held-out split has few distinct words of three letters.
_HELD_OUT: Final = "evaluation.problems=96"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A law of answer lengths, and the rollouts per optimizer step, which all arms of a comparison share."""

    lengths: str
    rollouts: int
    optimizer_steps: int

    @property
    def name(self) -> str:
        """The cell's name in tables."""
        return f"{self.lengths}, {self.rollouts} rollouts"

    @property
    def changes(self) -> tuple[str, ...]:
        """Changes of the recipe."""
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
    """An arm: its keys, and the optimizer steps per generation (1 if asynchronous)."""

    name: str
    keys: tuple[str, ...]
    generation: int = 1

    def changes(self, cell: Cell) -> tuple[str, ...]:
        """Return the changes of the recipe, in addition to the cell's."""
        steps = max(1, cell.optimizer_steps // self.generation)
        return (
            f"training.rollouts_per_step={cell.rollouts * self.generation}",
            f"training.mini_batches={self.generation}",
            f"run.steps={steps}",
            f"evaluation.interval_steps={steps}",
            f"checkpoint.interval_steps={steps}",
            f"actor.groups_in_flight={max(64, cell.rollouts * self.generation // 8)}",
            *self.keys,
        )


COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("reward at the end", "reward", ".3f"),
    Column("mean reward by samples", "area", ".3f"),
    Column("seconds", "seconds", ".0f"),
    *(Column(f"seconds to {target}", f"seconds_to_{target}", ".1f") for target in TARGETS),
    Column("tokens/s", "tokens_per_s", ".0f"),
    Column("lag", "lag", ".1f"),
    Column("discarded", "discarded", ".1%"),
    Column("ESS", "ess", ".3f"),
    Column("load", "load", ".1f"),
)


def schedules() -> list[Schedule]:
    """Return every arm."""
    synchronous = ("staleness.j=1", "staleness.k=1", f"launch.threads={len(os.sched_getaffinity(0))}")
    conventional = [Schedule(name=f"conventional G = {g}", keys=synchronous, generation=g) for g in GENERATIONS]
    return [*conventional, *(Schedule(name=name, keys=keys) for name, keys in _ASYNCHRONOUS.items())]


def figures(job: Job, run: FinishedRun) -> Figures:
    """Return `figures_of` the run, its seconds to each reward (None if never reached), and its lag.

    `lag` is the mean number of optimizer steps between the weights that sampled a rollout's oldest token and the step
    that trained it.
    """
    row = figures_of(job, run)
    several = next(each.generation for each in schedules() if each.name == job.arm)
    seconds, rewards = row["by_seconds"]
    for target in TARGETS:
        reached = (at for at, reward in zip(seconds, rewards, strict=True) if reward >= target)
        row[f"seconds_to_{target}"] = next(reached, None)
    return row | {"lag": (row["age"] - 1) * several + (several + 1) / 2}


def faster(runs: Sequence[Figures]) -> Mapping[str, Any]:
    """Return, by cell and arm, the median ratio of seconds to those of conventional G = 1, with its interval."""
    seconds = {(row["cell"], row["arm"], row["seed"]): row["seconds"] for row in runs}
    first, ratios = schedules()[0].name, dict[str, dict[str, Any]]()
    for cell, arm in dict.fromkeys((cell, arm) for cell, arm, _ in seconds):
        pairs = [
            value / seconds[cell, first, seed]
            for (c, a, seed), value in seconds.items()
            if (c, a) == (cell, arm) and (cell, first, seed) in seconds
        ]
        if pairs:
            ratios.setdefault(cell, {})[arm] = bootstrap_median(pairs).as_dict()
    return {"seconds_over_conventional": ratios}


def cells(*, quick: bool, recipe: str) -> list[Cell]:
    """Return the grid; a recipe other than the tiny one keeps its own lengths."""
    laws = tuple(_WORDS) if recipe == RECIPE else ("as the recipe",)
    if quick:
        return [Cell(lengths=laws[-1], rollouts=64, optimizer_steps=8)]
    return [Cell(lengths=law, rollouts=rollouts, optimizer_steps=400) for law in laws for rollouts in (64, 256)]


def run(
    quick: bool = False,
    *,
    recipe: str = RECIPE,
    changes: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    steps: int | None = None,
) -> None:
    """Train every arm of every cell with every seed, print and record."""
    grid = [replace(cell, optimizer_steps=steps or cell.optimizer_steps) for cell in cells(quick=quick, recipe=recipe)]
    jobs = [
        Job(each.name, seed, recipe, (*cell.changes, *each.changes(cell), *changes), cell.name)
        for seed in seeds[: 1 if quick else None]
        for cell in grid
        for each in (schedules()[:: len(GENERATIONS) + 3] if quick else schedules())
    ]
    runs = measured("schedules", jobs, figures, quick=quick, summary=faster)
    for cell in grid:
        rows = [row for row in runs if row["cell"] == cell.name]
        print(f"\nschedules: {recipe}, {cell.name}; mean over the seeds [lowest, highest]\n{table(rows, COLUMNS)}")
