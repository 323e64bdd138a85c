"""What staleness costs: the `tiny` recipe under six pairs (j, k), with and without truncated importance weights.

    (1, 1)     on policy, in lockstep: sample, train, publish, in turn
    (1, 2)     one step off
    (1, 8)     the preset `pipeline`: weights in flight after each step, and room in the queue
    (4, 8)     a reload every fourth step
    (16, 16)   a reload every sixteenth, and nothing older
    (16, 32)   RLAX's default

The objective is REINFORCE on the group's mean, token by token, so that nothing but the weight sees how old a token is:

    plain   1
    TIS-2   min(π / μ, 2)                      (Yao et al. 2025; RLAX's ClipHigher row)

For each: training reward against samples and against the wall's time, held-out accuracy of the last weights, sampled
tokens that were thrown away as stale, effective sample size and throughput. Nothing is demanded; `docs/staleness.png`
shows the curves. `--waste` prints what pacing wastes instead: shares of tokens and groups dropped as stale, of the
trainer's time spent waiting, and alarms. Wall times are of a machine that may do other things: samples are the axis to
trust.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.comparison import Column, table
from benchmarks.finished_run import FinishedRun, Points, discarded_share, steps_of, thinned, train, training_clock
from benchmarks.measure import write_record
from pipelinerl.config.recipe import load, to_table
from pipelinerl.observability.run_history import Series

RECIPE: Final = "tiny"
FIGURE: Final = Path(__file__).parent.parent / "docs" / "staleness.png"
BOUNDS: Final = ((1, 1), (1, 2), (1, 8), (4, 8), (16, 16), (16, 32))
#: What both objectives share, then each one's weight.
_SCORE: Final = "objective.grad1=logprob"
WEIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": (_SCORE, "objective.is_weight=one"),
    "TIS-2": (_SCORE, 'objective.is_weight={ kind = "token_ratio", high = 2.0 }'),
}
_STEPS: Final = ("run.steps=200", "evaluation.interval_steps=100")
_QUICK: Final = ("run.steps=32", "evaluation.interval_steps=16", "evaluation.problems=64")


@dataclass(frozen=True, slots=True)
class Arm:
    """A pair of bounds and a weight."""

    j: int
    k: int
    weight: str

    @property
    def name(self) -> str:
        """As the table says it."""
        return f"({self.j}, {self.k}) {self.weight}"

    @property
    def changes(self) -> tuple[str, ...]:
        """What it changes of the recipe."""
        return (f"staleness.j={self.j}", f"staleness.k={self.k}", *WEIGHTS[self.weight])


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of an arm.

    Attributes:
        accuracy: greedy, held out, of the last weights. completed: all steps were taken.
        reward: mean over the last tenth of the steps.
        age: versions between a rollout's oldest token and the step that trained it, mean over the steps.
        discarded: share of all sampled tokens, those of stale groups.
        ess: of the ratios π / μ, as a fraction of the tokens, mean over the steps.
        tokens_per_s: sampled tokens that were trained, by wall time of the training.
        by_samples, by_seconds: training reward against rollouts trained, and seconds since the first step began.
        ess_by_step: the curve.
    """

    arm: str
    seed: int
    completed: bool
    accuracy: float
    reward: float
    age: float
    discarded: float
    ess: float
    tokens_per_s: float
    by_samples: Points
    by_seconds: Points
    ess_by_step: Points


COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("reward at the end", "reward", ".3f"),
    Column("age", "age", ".1f"),
    Column("discarded", "discarded", ".1%"),
    Column("ESS", "ess", ".3f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
)


def arms() -> list[Arm]:
    """Every pair with every weight."""
    return [Arm(j, k, weight) for j, k in BOUNDS for weight in WEIGHTS]


def outcome(arm: Arm, seed: int, run: FinishedRun) -> Outcome:
    """The figures of a run.

    Raises:
        ValueError: its steps do not report one of them.
    """
    steps = partial(steps_of, run.history)
    reward, ess, sampled = steps("reward"), steps("ess"), steps("sampled_tokens")
    rollouts = tuple(accumulate(steps("rollouts").y))
    clock = training_clock(run.history)
    return Outcome(
        arm=arm.name,
        seed=seed,
        completed=run.completed,
        accuracy=run.accuracy,
        reward=run.history.last_reward or 0.0,
        age=fmean(steps("staleness_mean").y),
        discarded=discarded_share(run.history),
        ess=fmean(ess.y),
        tokens_per_s=sum(sampled.y) / clock[-1],
        by_samples=thinned(Series(rollouts, reward.smoothed().y)),
        by_seconds=thinned(Series(clock, reward.smoothed().y)),
        ess_by_step=thinned(ess.smoothed()),
    )


def draw(outcomes: Sequence[Outcome], path: Path) -> Path:
    """The figure: reward against samples, without and with weights; against seconds with them; ESS."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    (plain, weighed), (seconds, ess) = figure.subplots(2, 2)
    colours = ["#1f2430", "#2f6fed", "#18a999", "#f2a541", "#d1495b", "#8f5bd6"]
    shown = {
        plain: ("plain", "by_samples"),
        weighed: ("TIS-2", "by_samples"),
        seconds: ("TIS-2", "by_seconds"),
        ess: ("TIS-2", "ess_by_step"),
    }
    for axes, (weight, curve) in shown.items():
        for (j, k), colour in zip(BOUNDS, colours, strict=True):
            runs = [run for run in outcomes if run.arm == Arm(j, k, weight).name]
            for number, run in enumerate(runs):
                label = f"j = {j}, k = {k}" if number == 0 else None
                axes.plot(*getattr(run, curve), color=colour, linewidth=1.1, alpha=0.85, label=label)
        axes.grid(color="#e4e7ec", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    plain.set(title="Training reward, no weights", xlabel="rollouts trained")
    plain.legend(frameon=False, fontsize=8)
    weighed.set(title="Training reward, min(π/μ, 2)", xlabel="rollouts trained", ylim=plain.get_ylim())
    seconds.set(title="Training reward, min(π/μ, 2)", xlabel="seconds of training", ylim=plain.get_ylim())
    ess.set(title="Effective sample size, min(π/μ, 2)", xlabel="step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    return path


def run(quick: bool = False) -> list[Outcome]:
    """Train every arm with every seed and print the table; but for `quick`, record and draw after each seed."""
    outcomes: list[Outcome] = []
    overrides = _QUICK if quick else _STEPS
    for seed in range(1 if quick else 3):
        for arm in arms():
            began = time.monotonic()
            outcomes.append(outcome(arm, seed, train(RECIPE, [*overrides, *arm.changes], seed=seed)))
            said = f"staleness: seed {seed}, {arm.name}: {outcomes[-1].accuracy:.3f}"
            print(f"{said} after {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        if not quick:  # a long benchmark that is interrupted keeps the seeds it has
            recipe = to_table(load(RECIPE, overrides))
            changes = {arm.name: list(arm.changes) for arm in arms()}
            record = {"seeds": seed + 1, "recipe": recipe, "arms": changes, "runs": [asdict(each) for each in outcomes]}
            write_record("staleness", record)
            draw(outcomes, FIGURE)
    print(f"\nstaleness: the {RECIPE} recipe; mean over the seeds [least, greatest]\n{table(outcomes, COLUMNS)}")
    return outcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class Waste:
    """Waste of a run's pacing: shares of all sampled tokens, of all groups that ended, and of the trainer's time."""

    arm: str
    seed: int
    completed: bool
    accuracy: float
    tokens: float
    groups: float
    waits: float
    alarms: float


WASTE_COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("stale tokens", "tokens", ".1%"),
    Column("stale groups", "groups", ".1%"),
    Column("trainer waits", "waits", ".1%"),
    Column("alarms", "alarms", ".0f"),
)
#: The bounds as recipes have them, and steps of four groups on engines with places for 32.
WASTE_ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    "(1, 2)": ("staleness.j=1", "staleness.k=2"),
    "(1, 8)": ("staleness.j=1", "staleness.k=8"),
    "(16, 32)": ("staleness.j=16", "staleness.k=32"),
    "(1, 8), 4 groups": ("staleness.j=1", "staleness.k=8", "training.rollouts_per_step=32", "run.steps=400"),
}


def wasted(arm: str, seed: int, run: FinishedRun) -> Waste:
    """The figures of a run."""
    waits, ledger = steps_of(run.history, "wait_s").y, (run.history.finished or {}).get("ledger", {})
    ended = ledger.get("trained", 0) + ledger.get("stale", 0) + ledger.get("filtered", 0)
    return Waste(
        arm=arm,
        seed=seed,
        completed=run.history.finished is not None,
        accuracy=run.accuracy,
        tokens=discarded_share(run.history),
        groups=ledger.get("stale", 0) / max(1, ended),
        waits=sum(waits) / training_clock(run.history)[-1],
        alarms=sum(each["kind"] == "alarm" for each in run.history.incidents),
    )


def waste() -> list[Waste]:
    """Train each arm of `WASTE_ARMS` once and print what it wasted."""
    steps = ("run.steps=200", "evaluation.interval_steps=1000", "evaluation.problems=64")
    outcomes = [wasted(arm, 0, train(RECIPE, [*steps, *changes], seed=0)) for arm, changes in WASTE_ARMS.items()]
    print(f"\nstaleness: what pacing wastes on the {RECIPE} recipe\n{table(outcomes, WASTE_COLUMNS)}")
    return outcomes


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one seed and few steps; leaves no record")
    parser.add_argument("--waste", action="store_true", help="what pacing drops, and how long the trainer waits")
    arguments = parser.parse_args()
    if arguments.waste:
        waste()
    else:
        run(quick=arguments.quick)


if __name__ == "__main__":
    main()
