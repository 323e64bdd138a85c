"""What each schedule is worth: conventional RL with G optimizer steps for a generation, and the asynchronous ones.

    conventional G   generate G batches' worth, then take G optimizer steps; all cores generate, then all train
    one step off     (j, k) = (1, 2): the engine samples the next batch while the trainer trains on the last
    drain            (1, 8), and running answers end on old weights before an update
    RLAX             (16, 32)
    in flight        (1, 8), and running answers go on with new weights: PipelineRL

The same code, prompts, noise, objective and number of rollouts: an arm differs in its schedule's flags alone, and each
optimizer step is on as many rollouts in each. Cells are the rollouts of an optimizer step by a law of answers' lengths;
each is run with every seed. For each arm: training reward against rollouts, seconds and sampled tokens, held-out
accuracy of the last weights, ESS, age of tokens in optimizer steps, tokens that were thrown away. Nothing is demanded.

Times are of whole runs on this machine, which must do nothing else; `--recipe` takes a task whose model is large enough
that computing, and not the processes around it, decides. After each run it is said how long the rest will take.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate
from statistics import fmean, median
from typing import Final

from benchmarks.comparison import Column, table
from benchmarks.finished_run import FinishedRun, Points, discarded_share, steps_of, thinned, train, training_clock
from benchmarks.measure import bootstrap_median, write_record
from pipelinerl.config.recipe import load, to_table
from pipelinerl.observability.run_history import Series

RECIPE: Final = "tiny"
GENERATIONS: Final = (1, 2, 4, 8)
_ASYNCHRONOUS: Final[Mapping[str, tuple[str, ...]]] = {
    "one step off": ("staleness.j=1", "staleness.k=2"),
    "drain": ("staleness.j=1", "staleness.k=8", "engine.on_update=drain"),
    "RLAX (16, 32)": ("staleness.j=16", "staleness.k=32"),
    "in flight": ("staleness.j=1", "staleness.k=8", "engine.on_update=continue"),
}
#: Words to spell, of the shipped task: (letters from, to, weight) of each domain.
_WORDS: Final[Mapping[str, tuple[tuple[int, int, float], ...]]] = {
    "fixed": ((5, 5, 1.0),),
    "heavy-tailed": ((3, 3, 6.0), (5, 6, 2.0), (10, 12, 1.0)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What the arms of a comparison have in common: a law of lengths, and the rollouts of an optimizer step."""

    lengths: str
    rollouts: int
    optimizer_steps: int

    @property
    def name(self) -> str:
        """As the table says it."""
        return f"{self.lengths}, {self.rollouts} rollouts"

    @property
    def changes(self) -> tuple[str, ...]:
        """What it changes of the recipe."""
        if self.lengths == "as the recipe":
            return ()
        domains = ", ".join(
            f'{{ name = "words_{low}", source = "reasoning_gym:spell_backward", verifier = "reasoning_gym", '
            f"weight = {weight}, parameters = {{ min_word_len = {low}, max_word_len = {high}, "
            'answer_pattern = "[a-z]+" } }'
            for low, high, weight in _WORDS[self.lengths]
        )
        return (f"domains=[{domains}]", "sampling.max_tokens=16", "engine.context_length=48")


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """An arm: `generation` is G, the optimizer steps for which is sampled at once; 1 in an asynchronous one."""

    name: str
    flags: tuple[str, ...]
    generation: int = 1

    def changes(self, cell: Cell) -> tuple[str, ...]:
        """What it changes of the recipe, beside the cell's."""
        steps = max(1, cell.optimizer_steps // self.generation)
        return (
            f"training.rollouts_per_step={cell.rollouts * self.generation}",
            f"training.mini_batches={self.generation}",
            f"run.steps={steps}",
            f"evaluation.interval_steps={steps}",
            f"checkpoint.interval_steps={steps}",
            f"actor.groups_in_flight={max(64, cell.rollouts * self.generation // 8)}",
            *self.flags,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of an arm.

    Attributes:
        accuracy: greedy, held out, of the last weights. completed: all steps were taken.
        reward: mean over the last tenth of the steps. seconds: of the training, from before its first step.
        area: mean training reward over the rollouts: how fast, by samples.
        lag: optimizer steps from the weights that sampled a rollout's oldest token to those that it helped to make.
        discarded: share of all sampled tokens, those of stale groups. ess: of the ratios π/μ.
        by_samples, by_seconds, by_tokens: training reward against rollouts, seconds, sampled tokens.
    """

    arm: str
    cell: str
    seed: int
    completed: bool
    accuracy: float
    reward: float
    area: float
    seconds: float
    lag: float
    discarded: float
    ess: float
    tokens_per_s: float
    by_samples: Points
    by_seconds: Points
    by_tokens: Points


COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("reward at the end", "reward", ".3f"),
    Column("mean reward by samples", "area", ".3f"),
    Column("seconds", "seconds", ".0f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
    Column("lag", "lag", ".1f"),
    Column("discarded", "discarded", ".1%"),
    Column("ESS", "ess", ".3f"),
)


def schedules() -> list[Schedule]:
    """Every arm."""
    cores = len(os.sched_getaffinity(0))
    conventional = [
        Schedule(
            name=f"conventional G = {generation}",
            flags=("staleness.j=1", "staleness.k=1", f"launch.threads={cores}"),
            generation=generation,
        )
        for generation in GENERATIONS
    ]
    return [*conventional, *(Schedule(name=name, flags=flags) for name, flags in _ASYNCHRONOUS.items())]


def outcome(schedule: Schedule, cell: Cell, seed: int, run: FinishedRun) -> Outcome:
    """The figures of a run.

    Raises:
        ValueError: its steps do not report one of them.
    """
    steps = partial(steps_of, run.history)
    reward, sampled, rollouts = steps("reward"), steps("sampled_tokens").y, steps("rollouts").y
    clock = training_clock(run.history)
    smooth, several = reward.smoothed().y, schedule.generation
    return Outcome(
        arm=schedule.name,
        cell=cell.name,
        seed=seed,
        completed=run.completed,
        accuracy=run.accuracy,
        reward=run.history.last_reward or 0.0,
        area=fmean(reward.y),
        seconds=clock[-1],
        lag=(fmean(steps("staleness_mean").y) - 1) * several + (several + 1) / 2,
        discarded=discarded_share(run.history),
        ess=fmean(steps("ess").y),
        tokens_per_s=sum(sampled) / clock[-1],
        by_samples=thinned(Series(tuple(accumulate(rollouts)), smooth)),
        by_seconds=thinned(Series(clock, smooth)),
        by_tokens=thinned(Series(tuple(accumulate(sampled)), smooth)),
    )


def faster(outcomes: Sequence[Outcome], cell: Cell) -> Mapping[str, dict[str, float]]:
    """Seconds of each arm over those of conventional G = 1, median over the seeds, with its interval."""
    seconds = {(each.arm, each.seed): each.seconds for each in outcomes if each.cell == cell.name}
    first = schedules()[0].name
    return {
        arm: bootstrap_median([seconds[arm, s] / seconds[first, s] for a, s in seconds if a == arm]).as_dict()
        for arm in dict.fromkeys(arm for arm, _ in seconds)
    }


def cells(*, quick: bool, recipe: str) -> list[Cell]:
    """The grid; of another recipe its own lengths."""
    laws = tuple(_WORDS) if recipe == RECIPE else ("as the recipe",)
    if quick:
        return [Cell(lengths=laws[-1], rollouts=64, optimizer_steps=8)]
    return [Cell(lengths=law, rollouts=rollouts, optimizer_steps=400) for law in laws for rollouts in (64, 256)]


def run(
    quick: bool = False, *, recipe: str = RECIPE, changes: Sequence[str] = (), optimizer_steps: int | None = None
) -> list[Outcome]:
    """Train every arm of every cell with every seed and print the tables; but for `quick`, record after each seed."""
    grid = [
        cell if optimizer_steps is None else replace(cell, optimizer_steps=optimizer_steps)
        for cell in cells(quick=quick, recipe=recipe)
    ]
    shared = (*changes, "evaluation.problems=64") if quick else tuple(changes)
    outcomes: list[Outcome] = []
    took: list[float] = []
    seeds, total = range(1 if quick else 3), len(grid) * len(schedules()) * (1 if quick else 3)
    for seed in seeds:
        for cell in grid:
            for schedule in schedules():
                began = time.monotonic()
                finished = train(recipe, [*shared, *cell.changes, *schedule.changes(cell)], seed=seed)
                outcomes.append(outcome(schedule, cell, seed, finished))
                took.append(time.monotonic() - began)
                left = (total - len(took)) * median(took) / 60
                said = f"schedules: seed {seed}, {cell.name}, {schedule.name}: {outcomes[-1].accuracy:.3f}"
                print(f"{said} after {took[-1]:.0f} s; the rest takes about {left:.0f} minutes", file=sys.stderr)
        if not quick:  # a long benchmark that is interrupted keeps the seeds it has
            record = {
                "seeds": seed + 1,
                "recipe": to_table(load(recipe, shared)),
                "runs": [asdict(o) for o in outcomes],
            }
            ratios = {cell.name: faster(outcomes, cell) for cell in grid}
            write_record("schedules", record | {"seconds_of_conventional": ratios})
    for cell in grid:
        its = [each for each in outcomes if each.cell == cell.name]
        print(f"\nschedules: {recipe}, {cell.name}; mean over the seeds [least, greatest]\n{table(its, COLUMNS)}")
    return outcomes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed, one cell, few steps; leaves no record")
    parser.add_argument("--recipe", default=RECIPE, help="a recipe whose lengths are taken as they are")
    parser.add_argument("--optimizer-steps", type=int, help="of each run (default: 400, quick 8)")
    parser.add_argument("changes", nargs="*", metavar="section.key=value", help="of the recipe, in every arm")
    given = parser.parse_args()
    run(given.quick, recipe=given.recipe, changes=given.changes, optimizer_steps=given.optimizer_steps)


if __name__ == "__main__":
    main()
