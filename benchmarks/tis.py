"""Training on rollouts of a quantised engine, under several corrections for it: the TIS note's scenario, rerun small.

The `tiny` recipe, as `make run` trains it, with an engine that serves int8 weights; the trainer stays in float32. With
μ the policy that sampled (quantised, up to one version old), π_old the trainer's own recomputation at the weights that
the step starts from, and π the current policy (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You
Off-Policy RL Training"):

    PPO          clip(π / π_old): who sampled is ignored
    PPO-IS       clip(π / μ): one ratio for both, the recipe's own objective
    Vanilla-IS   π_old / μ · clip(π / π_old)
    TIS-2        min(π_old / μ, 2) · clip(π / π_old)

PPO-IS on native weights is the recipe unchanged; PPO on native weights shows what ignoring the sampler costs when it
differs by its age alone.

One optimizer step is taken on each batch, so π = π_old in value: PPO never clips here, and π_old / μ holds what
quantising did and what one version of age did. The mismatch, mean |Δ log p| between sampler and trainer, is told for
all tokens, and for those that the trainer's own weights sampled, where quantising is its only cause. Two accuracies are
told of the same held-out problems, both greedy: of the weights that were trained, in float32 (what a run is for), and
of the engine that served them quantised (what the run's own log shows).

`--weights int8 int4` adds arms with a coarser rounding and a mismatch about ten times as large; `staleness.k=1` among
the overrides takes age out of the comparison. Nothing is demanded: the note's result is about larger models, and what
comes out here is what is reported.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Final

from benchmarks.comparison import Column, by_arm, table
from benchmarks.finished_run import FinishedRun, Points, steps_of, thinned, train
from benchmarks.measure import write_record
from pipelinerl.config.recipe import load, to_table
from pipelinerl.enums import WeightFormat

RECIPE: Final = "tiny"
FIGURE: Final = Path(__file__).parent.parent / "docs" / "tis.png"
_QUICK: Final = ("run.steps=24", "evaluation.interval_steps=12", "evaluation.problems=64")

_OVER_OLD: Final = "objective.grad1.over=old"
_OLD_OVER_BEHAVIOR: Final = 'kind = "token_ratio", numerator = "old", denominator = "behavior"'
#: What each objective changes of the recipe.
OBJECTIVES: Final[Mapping[str, tuple[str, ...]]] = {
    "PPO": (_OVER_OLD,),
    "PPO-IS": (),
    "Vanilla-IS": (_OVER_OLD, f"objective.is_weight={{ {_OLD_OVER_BEHAVIOR} }}"),
    "TIS-2": (_OVER_OLD, f"objective.is_weight={{ {_OLD_OVER_BEHAVIOR}, high = 2.0 }}"),
}


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train: its name, and what it changes of the recipe."""

    name: str
    changes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One run of an arm.

    Attributes:
        steps: optimizer steps it took; `completed`: all of the recipe's.
        trained, served: held-out accuracy at the end, of the weights in float32 and of the engine.
        mismatch, mismatch_max: |Δ log p| between sampler and trainer, mean over the steps and greatest of any token.
        numerics: the mean again, of tokens that were sampled by the weights that the step starts from.
        response_max: of the same tokens, a response's greatest |Δp|, as in the note; mean over responses and steps.
        ess: of the ratios π / μ, as a fraction of the tokens, mean over the steps.
        clipped, truncated: shares of tokens, mean over the steps. entropy: mean over the last tenth of the steps.
        curves: by name, of the figure: (x, y).
    """

    arm: str
    seed: int
    steps: int
    completed: bool
    trained: float
    served: float
    mismatch: float
    mismatch_max: float
    numerics: float
    response_max: float
    ess: float
    clipped: float
    truncated: float
    entropy: float
    curves: dict[str, Points]


COLUMNS: Final = (
    Column("trained", "trained", ".3f"),
    Column("served", "served", ".3f"),
    Column("mismatch", "mismatch", ".2g"),
    Column("its max", "mismatch_max", ".2g"),
    Column("of numerics", "numerics", ".2g"),
    Column("max Δp of a response", "response_max", ".2g"),
    Column("ESS", "ess", ".4f"),
    Column("clipped", "clipped", ".2%"),
    Column("truncated", "truncated", ".2%"),
    Column("entropy", "entropy", ".3f"),
)


def arms(weights: Sequence[WeightFormat]) -> list[Arm]:
    """The references on native weights, and every objective on each of `weights`."""
    chosen = [(WeightFormat.NATIVE, name) for name in ("PPO-IS", "PPO")]
    chosen += [(form, name) for form in weights for name in OBJECTIVES]
    return [Arm(f"{form} {name}", (f"engine.weights={form}", *OBJECTIVES[name])) for form, name in chosen]


def trained(arm: Arm, *, seed: int, overrides: Sequence[str]) -> Outcome:
    """One `pipelinerl run`, and what came of it.

    Raises:
        RuntimeError: it ended before it had an evaluation and a checkpoint.
    """
    return outcome(arm, seed, train(RECIPE, [*overrides, *arm.changes], seed=seed))


def outcome(arm: Arm, seed: int, run: FinishedRun) -> Outcome:
    """The figures of a run.

    Raises:
        ValueError: its steps do not report one of them.
    """
    history = run.history
    steps = partial(steps_of, history)
    mismatch, ess, entropy = steps("logprob_difference_mean"), steps("ess"), steps("entropy")
    accuracy = history.series(history.evaluations, "accuracy", x="model_version")
    curves = {"accuracy": accuracy, "ess": ess.smoothed(), "mismatch": mismatch.smoothed()}
    return Outcome(
        arm=arm.name,
        seed=seed,
        steps=len(history.steps),
        completed=run.completed,
        trained=run.accuracy,
        served=accuracy.y[-1],
        mismatch=fmean(mismatch.y),
        mismatch_max=max(steps("logprob_difference_max").y),
        numerics=fmean(steps("mismatch_numerics_mean").y),
        response_max=fmean(steps("mismatch_numerics_response_max").y),
        ess=fmean(ess.y),
        clipped=fmean(steps("clip_fraction").y),
        truncated=fmean(steps("truncated_fraction").y),
        entropy=fmean(entropy.y[-max(1, len(entropy.y) // 10) :]),
        curves={name: thinned(series) for name, series in curves.items()},
    )


def draw(outcomes: Sequence[Outcome], path: Path) -> Path:
    """The figure: accuracy as served, final accuracy of the trained weights, ESS and mismatch; one colour an arm."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    served, final, ess, mismatch = figure.subplots(2, 2).flat
    panels = {"accuracy": served, "ess": ess, "mismatch": mismatch}
    runs_of = by_arm(outcomes)
    colours = ["#1f2430", "#9aa3b2", *colormaps["tab10"].colors]  # type: ignore[attr-defined]  # native ones in grey
    for number, (name, runs) in enumerate(runs_of.items()):
        colour = colours[number]
        for curve, axes in panels.items():
            for run, label in zip(runs, [name, *[""] * (len(runs) - 1)], strict=True):
                axes.plot(*run.curves[curve], color=colour, linewidth=1.1, alpha=0.8, label=label or None)
        final.plot([run.trained for run in runs], [number] * len(runs), "o", color=colour, alpha=0.8)
    served.set(title="Held-out accuracy of the engine", xlabel="step")
    served.legend(frameon=False, fontsize=8)
    final.set(title="Held-out accuracy of the trained weights, float32", yticks=range(len(runs_of)))
    final.set_yticklabels(list(runs_of))
    final.invert_yaxis()
    ess.set(title="Effective sample size, current over behavior", xlabel="step")
    mismatch.set(title="Mean |Δ log p| between sampler and trainer", xlabel="step", yscale="log")
    for axes in (served, final, ess, mismatch):
        axes.grid(color="#e4e7ec", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, facecolor="white", metadata={"Software": None})
    return path


def run(quick: bool = False, *, weights: Sequence[WeightFormat] = (WeightFormat.INT8,)) -> list[Outcome]:
    """Train every arm with every seed and print the table; but for `quick`, record and draw after each seed."""
    outcomes: list[Outcome] = []
    for seed in range(1 if quick else 3):
        outcomes += _seed(seed, arms(weights), overrides=_QUICK if quick else ())
        if not quick:  # a long benchmark that is interrupted keeps the seeds it has
            changes = {arm.name: list(arm.changes) for arm in arms(weights)}
            runs = [asdict(each) for each in outcomes]
            write_record("tis", {"seeds": seed + 1, "recipe": to_table(load(RECIPE)), "arms": changes, "runs": runs})
            draw(outcomes, FIGURE)
    _tell(outcomes)
    return outcomes


def _seed(seed: int, chosen: Sequence[Arm], *, overrides: Sequence[str]) -> list[Outcome]:
    outcomes = []
    for arm in chosen:
        began = time.monotonic()
        outcomes.append(trained(arm, seed=seed, overrides=overrides))
        said = f"tis: seed {seed}, {arm.name}: {outcomes[-1].trained:.3f} after {time.monotonic() - began:.0f} s"
        print(said, file=sys.stderr, flush=True)
    return outcomes


def _tell(outcomes: Sequence[Outcome]) -> None:
    print(f"\ntis: the {RECIPE} recipe on quantised rollouts; mean over the seeds [least, greatest]")
    print(table(outcomes, COLUMNS))


def main() -> None:
    """The command line: the benchmark, or with overrides a closer look at one seed, which leaves no record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="SECTION.KEY=VALUE", help="changes of the recipe, for all arms")
    parser.add_argument("--quick", action="store_true", help="one seed and few steps; leaves no record")
    formats = [WeightFormat.INT8, WeightFormat.INT4]
    parser.add_argument("--weights", nargs="+", type=WeightFormat, choices=formats, default=formats[:1])
    given = parser.parse_args()
    if given.overrides:
        quick = _QUICK if given.quick else ()
        _tell(_seed(0, arms(given.weights), overrides=[*quick, *given.overrides]))
    else:
        run(quick=given.quick, weights=given.weights)


if __name__ == "__main__":
    main()
