"""Measure the cost of staleness: `tiny` with six pairs (j, k), with and without importance weights.

An engine's weights are at most j versions old, and a trained token at most k.

    (1, 1)     on policy, in lockstep: sample, train, publish, in turn
    (1, 2)     one step off
    (1, 8)     in-flight weights after each step, and room in the queue
    (4, 8)     a publication every fourth step
    (16, 16)   a publication every sixteenth step; tokens of earlier weights are not trained
    (16, 32)   RLAX's default

The objective is REINFORCE per token with the group's mean as baseline, so only the importance weight depends on a
token's age: it is 1 in the arms `plain`, and min(π / μ, 2) in the arms `TIS-2` (Yao et al. 2025; ClipHigher in RLAX's
table). No target is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from benchmarks.arms import Column, Job, figures_of, measured, table

RECIPE: Final = "tiny"
BOUNDS: Final = ((1, 1), (1, 2), (1, 8), (4, 8), (16, 16), (16, 32))
_SCORE: Final = "objective.grad1=logprob"
WEIGHTS: Final[Mapping[str, tuple[str, ...]]] = {
    "plain": (_SCORE, "objective.is_weight=one"),
    "TIS-2": (_SCORE, 'objective.is_weight={ kind = "token_ratio", high = 2.0 }'),
}
#: Overrides of the recipe's keys, by arm.
ARMS: Final[Mapping[str, tuple[str, ...]]] = {
    f"({j}, {k}) {name}": (f"staleness.j={j}", f"staleness.k={k}", *changes)
    for j, k in BOUNDS
    for name, changes in WEIGHTS.items()
}
COLUMNS: Final = (
    Column("held-out", "accuracy", ".3f"),
    Column("reward at the end", "reward", ".3f"),
    Column("age", "age", ".1f"),
    Column("discarded", "discarded", ".1%"),
    Column("ESS", "ess", ".3f"),
    Column("tokens/s", "tokens_per_s", ".0f"),
)


def run(quick: bool = False, *, seeds: Sequence[int] = (0, 1, 2)) -> None:
    """Train every arm with every seed, print a table of the results and, unless `quick`, record them."""
    steps = 32 if quick else 200
    shared = (f"run.steps={steps}", f"evaluation.interval_steps={steps // 2}", "evaluation.problems=64")
    jobs = [
        Job(arm, seed, RECIPE, (*shared[: 3 if quick else 2], *changes))
        for seed in seeds[: 1 if quick else None]
        for arm, changes in list(ARMS.items())[: 2 if quick else None]
    ]
    runs = measured("staleness", jobs, figures_of, quick=quick)
    print(f"\nstaleness: the {RECIPE} recipe; mean over the seeds [lowest, highest]\n{table(runs, COLUMNS)}")
