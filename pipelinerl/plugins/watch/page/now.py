"""The current state of a run: means over recent steps with intervals, token ages, mismatch and waits by cause. No I/O.

A mean is taken over a window of recent steps, each weighted by its rollouts; its interval is ±1.96 standard errors.
While the model learns fast, the steps of a window are not independent. The interval is then too wide rather than too
narrow, because the trend adds to the deviation. Intervals of accuracies are clipped to [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any, Final

from pipelinerl.observability.events import Event, amount, cut, number, sentence
from pipelinerl.observability.run_history import groups_of, mean_of, stale_share
from pipelinerl.plugins.watch.page.run_view import RunView

_Z: Final = 1.959964
#: Metrics of a domain that are averaged over its rollouts.
_MEANS: Final = ("length_mean", "length_p95", "truncated", "all_right", "all_wrong", "unjudged", "turns", "segments")
_SUMS: Final = (
    "stale_groups", "verifier_errors", "resting", "passed_over", "episodes", "calls_parsed", "calls_malformed",
    "tool_errors",
)  # fmt: skip
_CAUSES: Final = ("numerics", "cache", "staleness", "truncation")
_OF_CAUSE: Final = ("share", "mean", "p95", "max", "k3", "ess")
_AGE: Final = "age_"

Figures = Mapping[str, Any]


def overview(view: RunView, *, window: int) -> dict[str, Any]:
    """Return the metrics of the last `window` steps and the current state of the run."""
    steps = list(islice(reversed(view.recent), window))[::-1]
    domains, given_up = _by_domain(steps), sum(islice(reversed(view.given_up), window))
    stale = sum(amount(each, "stale_groups") for each in domains)
    return {
        "step": view.step,
        "window": len(steps),
        "overall": _overall(steps),
        "domains": [_group(*each) for each in groups_of(steps, "by_domain").items()],
        "tags": [_group(*each) for each in groups_of(steps, "by_tag").items()],
        "staleness": _ages(steps),
        "lag": str(steps[-1].get("lag", "")) if steps else "",
        "mismatch": [_of_cause(steps, cause) for cause in _CAUSES],
        "stale": {
            "groups": stale,
            "share": stale_share(domains),
            "by_cause": [
                {"cause": "dropped by the trainer", "groups": max(0.0, stale - given_up)},
                {"cause": "given up by an actor", "groups": float(given_up)},
            ],
        },
        "waits": _waits(steps, view),
        "step_time": {
            "wait_s": _median(steps, "wait_s"),
            "step_s": _median(steps, "step_s"),
            "pause_s": median(view.pauses_s) if view.pauses_s else None,
        },
        "alarms": [
            {"alarm": kind, "domain": domain, "step": event.get("step"), "what": sentence(event)}
            for (kind, domain), event in view.alarms.items()
        ],
        "held_out": [
            {"name": name, "version": event.get("model_version")}
            | {field: event.get(field) for field in ("accuracy", "low", "high", "problems")}
            for name, event in view.evaluations.items()
        ],
        "ledger": view.ledger,
        "incidents": [
            {
                "time": each.event.get("time"),
                "kind": each.kind,
                "count": each.count,
                "seconds": each.seconds,
                "what": sentence(each.event),
                "engine": view.engines.get(cut(each.event.get("url", "")), {}).get("name", "")
                if each.kind == "engine_lost"
                else "",
            }
            for each in view.incidents.ranked()[:50]
        ],
    }


def _overall(steps: Sequence[Event]) -> dict[str, Any]:
    seconds = sum(amount(step, "step_s") + amount(step, "wait_s") for step in steps)
    rollouts = sum(amount(step, "rollouts") for step in steps)
    tokens = sum(amount(step, "sampled_tokens") for step in steps)
    return {
        "reward": estimate(steps, "reward"),
        "unjudged": mean_of(_by_domain(steps), "unjudged"),
        "accuracy": estimate(steps, "accuracy", share=True) or estimate(_by_domain(steps), "accuracy", share=True),
        "length": mean_of(steps, "length_mean"),
        "truncated": mean_of(steps, "truncated"),
        "entropy": mean_of(steps, "entropy"),
        "tokens_per_s": tokens / seconds if seconds else None,
        "rollouts_per_s": rollouts / seconds if seconds else None,
    }


def _by_domain(steps: Sequence[Event]) -> list[Figures]:
    return [each for figures in groups_of(steps, "by_domain").values() for each in figures]


def _group(name: str, figures: Sequence[Figures]) -> dict[str, Any]:
    row = {figure: mean_of(figures, figure) for figure in _MEANS}
    for figure in _SUMS:
        known = [value for each in figures if (value := number(each, figure)) is not None]
        row[figure] = sum(known) if known else None
    return {
        "name": name,
        "rollouts": sum(amount(each, "rollouts") for each in figures),
        "reward": estimate(figures, "reward"),
        "accuracy": estimate(figures, "accuracy", share=True),
        "stale": stale_share(figures),
        "verifier_s": mean_of(figures, "verifier_s", weight="verified"),
        "environment_s": mean_of(figures, "environment_s", weight="episodes"),
        **row,
    }


def _ages(steps: Sequence[Event]) -> list[dict[str, Any]]:
    """Return the share of trained tokens of each age in versions; ages are named as in `numerics.causes.figures`."""
    shares: dict[str, float] = {}
    for step in steps:
        tokens = number(step, "sampled_tokens") or 1.0
        for name in step:
            if name.startswith(_AGE) and name.endswith("_share"):
                age = name.removeprefix(_AGE).removesuffix("_share")
                shares[age] = shares.get(age, 0.0) + tokens * amount(step, name)
    total = sum(shares.values())
    ages = sorted(shares, key=lambda age: (len(age.partition("_")[0]), age))
    return [{"age": age, "share": shares[age] / total} for age in ages] if total else []


def _of_cause(steps: Sequence[Event], cause: str) -> dict[str, Any]:
    row: dict[str, Any] = {"cause": cause}
    for figure in _OF_CAUSE:
        name = f"mismatch_{cause}_{figure}"
        if figure == "share":  # a step without this field has a share of zero
            weights = [amount(step, "sampled_tokens") for step in steps]
            total = sum(weights)
            parts = zip(steps, weights, strict=True)
            row[figure] = sum(amount(s, name) * w for s, w in parts) / total if total else None
        elif figure == "max":
            row[figure] = max((v for step in steps if (v := number(step, name)) is not None), default=None)
        else:
            row[figure] = mean_of(steps, name, weight="sampled_tokens")
    return row


def _waits(steps: Sequence[Event], view: RunView) -> list[dict[str, Any]]:
    """Return how many seconds the steps spent in each activity; verification and update pauses overlap with others."""
    stepping = sum(amount(step, "step_s") for step in steps)
    waited = sum(amount(step, "wait_s") for step in steps)
    wall = stepping + waited
    if len(steps) > 1:
        first, last = number(steps[0], "elapsed_s"), number(steps[-1], "elapsed_s")
        if first is not None and last is not None:
            wall = max(wall, last - first)
    verified = sum(amount(each, "verifier_s") * amount(each, "verified") for each in _by_domain(steps))
    pauses = sum(islice(reversed(view.pauses_s), len(steps)))
    seconds_by_cause = {
        "engines: sampling the next batch": waited,
        "trainer: the step itself": stepping,
        "verifiers, during sampling": verified,
        "engines: paused by weight updates": pauses,
    }
    return [
        {"culprit": culprit, "seconds": seconds, "share": seconds / wall if wall else None}
        for culprit, seconds in seconds_by_cause.items()
    ]


def estimate(figures: Sequence[Figures], name: str, *, share: bool = False) -> dict[str, float | None] | None:
    """Return the rollout-weighted mean of the metric `name`, with its 95 % interval; None if no step has it.

    With `share`, the metric is a proportion in [0, 1]. Otherwise, the interval of a single step is None.
    """
    pairs = [
        (value, weight)
        for each in figures
        if (value := number(each, name)) is not None and (weight := amount(each, "rollouts")) > 0
    ]
    total = math.fsum(weight for _, weight in pairs)
    if not total:
        return None
    mean = math.fsum(value * weight for value, weight in pairs) / total
    half = 0.0
    if share:  # a share of right answers is binomial, so its deviation is known even from a single step
        half = _Z * math.sqrt(max(0.0, mean * (1.0 - mean)) / total)
    elif len(pairs) == 1:
        return {"mean": mean, "low": None, "high": None}
    if len(pairs) > 1:  # standard error of a ratio over steps (Cochran 1977)
        squares = math.fsum((weight * (value - mean)) ** 2 for value, weight in pairs)
        half = max(half, _Z * math.sqrt(squares * len(pairs) / (len(pairs) - 1)) / total)
    low, high = mean - half, mean + half
    return {"mean": mean, "low": max(0.0, low) if share else low, "high": min(1.0, high) if share else high}


def _median(steps: Sequence[Event], name: str) -> float | None:
    known = [value for step in steps if (value := number(step, name)) is not None]
    return median(known) if known else None
