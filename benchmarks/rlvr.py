"""Measure whether the reward of each domain of the shipped recipe `rlvr` rises, with three seeds.

For each domain, the rewards of the first steps are compared with those of the last steps. They are training rewards
from the run's events: answers sampled at temperature 1. Each of the two windows has a median over its steps with a
bootstrap interval; the reward has risen if the last window's interval lies above the first one's. The greedy accuracy
on held-out problems is shown, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from benchmarks.arms import Figures, FinishedRun, Job, measured
from benchmarks.measure import Interval, Row, bootstrap_median, print_table
from pipelinerl.observability.events import Event

RECIPE: Final = "rlvr"
#: Number of steps in each window: the first steps and the last steps of a run.
WINDOW: Final = 20
_QUICK: Final = ("run.steps=20", "evaluation.problems=24")


def figures(_: Job, run: FinishedRun) -> Figures:
    """Return the curves of every domain in a run, to be recorded."""
    steps, evaluations = run.history.steps, run.history.evaluations
    domains = {each.name: curves(steps, evaluations, each.name) for each in run.config.trained_domains}
    return {"completed": run.completed, "domains": domains}


def curves(steps: Sequence[Event], evaluations: Sequence[Event], domain: str) -> dict[str, Any]:
    """Return a domain's rewards in the first and the last window, its rewards at all steps, and held-out accuracies."""
    rewards = [step["by_domain"][domain]["reward"] for step in steps if "reward" in step["by_domain"].get(domain, {})]
    first, last = bootstrap_median(rewards[:WINDOW]), bootstrap_median(rewards[-WINDOW:])
    return {
        "first": first.as_dict(),
        "last": last.as_dict(),
        "rises": last.low > first.high,
        "held_out": [round(each["by_domain"][domain]["accuracy"], 3) for each in evaluations],
        "rewards": [round(reward, 3) for reward in rewards],
    }


def rows(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the rows of the table, one for each seed and domain."""
    lines = []
    for each in runs:
        for name, domain in each["domains"].items():
            first, last = Interval(**domain["first"]), Interval(**domain["last"])
            held_out = f"held out {domain['held_out'][0]:.2f} → {domain['held_out'][-1]:.2f}"
            shown = f"{first} → {last}; {held_out}"
            lines.append(Row(f"seed {each['seed']}, {name}: reward", shown, "rises", domain["rises"]))
    return lines


def run(quick: bool = False, *, seeds: Sequence[int] = (0, 1, 2), changes: Sequence[str] = ()) -> None:
    """Train with each seed, print the table and, unless `quick`, write the record."""
    wanted = (*(_QUICK if quick else ()), *changes)
    jobs = [Job(RECIPE, seed, RECIPE, wanted) for seed in seeds[: 1 if quick else None]]
    print_table("rlvr", rows(measured("rlvr", jobs, figures, quick=quick, judged=False)))
