"""Train on rollouts of an engine that serves int8 weights, under several corrections for the mismatch.

The recipe is `tiny`; the trainer stays in float32. μ is the policy that sampled (quantised, up to one version old),
π_old the trainer's recomputation at the weights that the step starts from, π the current policy (Yao et al. 2025, "Your
Efficient RL Framework Secretly Brings You Off-Policy RL Training"):

    PPO          clip(π / π_old), which ignores the sampler
    PPO-IS       clip(π / μ), the recipe's own objective: the clipped ratio also corrects the mismatch
    Vanilla-IS   π_old / μ · clip(π / π_old)
    TIS-2        min(π_old / μ, 2) · clip(π / π_old)

PPO-IS on native (unquantised) weights is the recipe unchanged. PPO on native weights shows the cost of ignoring the
sampler's policy when it differs from the trainer's only by its age. Each batch takes one optimizer step, so π = π_old
in value and PPO never clips. No target is set. `--plot` draws docs/pictures/tis.png.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks import arms
from benchmarks.arms import Column, Figures, FinishedRun, Job, steps_of, thinned
from pipelinerl.enums import WeightFormat

RECIPE: Final = "tiny"
_QUICK: Final = ("run.steps=24", "evaluation.interval_steps=12", "evaluation.problems=64")
_OVER_OLD: Final = "objective.grad1.over=old"
_OLD_OVER_BEHAVIOR: Final = 'kind = "token_ratio", numerator = "old", denominator = "behavior"'
#: Overrides of the recipe's keys, by objective.
OBJECTIVES: Final[Mapping[str, tuple[str, ...]]] = {
    "PPO-IS": (),
    "PPO": (_OVER_OLD,),
    "Vanilla-IS": (_OVER_OLD, f"objective.is_weight={{ {_OLD_OVER_BEHAVIOR} }}"),
    "TIS-2": (_OVER_OLD, f"objective.is_weight={{ {_OLD_OVER_BEHAVIOR}, high = 2.0 }}"),
}
#: Overrides of the recipe's keys, by arm: two reference arms on native weights, and every objective on int8 weights.
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    f"{form} {name}": (f"engine.weights={form}", *OBJECTIVES[name])
    for form, names in ((WeightFormat.NATIVE, ("PPO-IS", "PPO")), (WeightFormat.INT8, tuple(OBJECTIVES)))
    for name in names
}
COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("mismatch", "mismatch", ".2g"),
    Column("of numerics", "numerics", ".2g"),
    Column("ESS", "ess", ".4f"),
)


def figures(_: Job, run: FinishedRun) -> Figures:
    """Return the figures to record for a run.

    `mismatch` is the mean |Δ log p| between sampler and trainer. `numerics` is this mean over only those tokens that
    were sampled with the step's starting weights, where all difference is due to quantisation. Each figure other than
    `accuracy` and the curves is a mean over the steps.
    """
    steps = partial(steps_of, run.history)
    mismatch, ess = steps("logprob_difference_mean"), steps("ess")
    served = run.history.series(run.history.evaluations, "accuracy", x="model_version")
    return {
        "completed": run.completed,
        "accuracy": run.accuracy,
        "mismatch": fmean(mismatch.y),
        "numerics": fmean(steps("mismatch_numerics_mean").y),
        "ess": fmean(ess.y),
        "clipped": fmean(steps("clip_fraction").y),
        "truncated": fmean(steps("truncated_fraction").y),
        "curves": {
            "accuracy": thinned(served),
            "ess": thinned(ess.smoothed()),
            "mismatch": thinned(mismatch.smoothed()),
        },
    }


def run(quick: bool = False, *, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Train every arm with every seed, print a table of the results and, unless `quick`, record them."""
    jobs = [
        Job(arm, seed, RECIPE, (*(_QUICK if quick else ()), *changes))
        for seed in seeds[: 1 if quick else None]
        for arm, changes in list(ARMS.items())[-1 if quick else 0 :]
    ]
    runs = arms.measured("tis", jobs, figures, quick=quick)
    print(f"\ntis: the {RECIPE} recipe on quantised rollouts; mean over the seeds [lowest, highest]")
    print(arms.table(runs, COLUMNS))


def plot(runs: Sequence[Figures] | None = None, path: Path = arms.PICTURES / "tis.png") -> Path:
    """Draw the accuracy of the served weights, the final accuracy of the trained weights, ESS and mismatch, by arm."""
    by_arm = arms.by_arm(arms.recorded("tis") if runs is None else runs)

    def draw(axes: Sequence[Any]) -> None:
        from matplotlib import colormaps

        served, final, ess, mismatch = axes
        colours = ["#1f2430", "#9aa3b2", *colormaps["tab10"].colors]  # type: ignore[attr-defined]  # native ones in grey
        for number, (name, rows) in enumerate(by_arm.items()):
            for curve, panel in (("accuracy", served), ("ess", ess), ("mismatch", mismatch)):
                for row in rows:
                    label = name if row is rows[0] else None
                    panel.plot(*row["curves"][curve], color=colours[number], linewidth=1.1, alpha=0.8, label=label)
            accuracies = [row["accuracy"] for row in rows]
            final.plot(accuracies, [number] * len(rows), "o", color=colours[number], alpha=0.8)
        served.set(title="Held-out accuracy of the engine", xlabel="step")
        served.legend(frameon=False, fontsize=8)
        final.set(title="Held-out accuracy of the trained weights, float32", yticks=range(len(by_arm)))
        final.set_yticklabels(list(by_arm))
        final.invert_yaxis()
        ess.set(title="Effective sample size, current over behavior", xlabel="step")
        mismatch.set(title="Mean |Δ log p| between sampler and trainer", xlabel="step", yscale="log")

    return arms.panels(path, draw)
