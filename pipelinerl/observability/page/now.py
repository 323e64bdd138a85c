"""The current state of a run: means over recent steps with intervals, token ages, mismatch and waits by cause. No I/O.

A mean is taken over a window of recent steps, each weighted by its rollouts; its interval is ±1.96 standard errors.
While the model learns fast, the steps of a window are not independent. The interval is then too wide rather than too
narrow, because the trend adds to the deviation. Intervals of accuracies are clipped to [0, 1].
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from statistics import median
from typing import Any, Final

from pipelinerl.observability.events import Event
from pipelinerl.observability.page.run_view import RunView, sentence

_Z: Final = 1.959964
#: Metrics of a domain that are averaged over its rollouts.
_MEANS: Final = ("length_mean", "length_p95", "truncated", "all_right", "all_wrong", "unjudged", "turns", "segments")
_SUMS: Final = (
    "stale_groups",
    "verifier_errors",
    "resting",
    "passed_over",
    "episodes",
    "calls_parsed",
    "calls_malformed",
    "tool_errors",
)
_CAUSES: Final = ("numerics", "cache", "staleness")
_OF_CAUSE: Final = ("share", "mean", "p95", "max", "k3", "ess")
_AGE: Final = "age_"

Figures = Mapping[str, Any]


def overview(view: RunView, *, window: int) -> dict[str, Any]:
    """Return the metrics of the last `window` steps and the current state of the run."""
    steps = list(islice(reversed(view.recent), window))[::-1]
    ended = sum(islice(reversed(view.sampled_by), window), Counter[str]())
    return {
        "step": view.step,
        "window": len(steps),
        "overall": _overall(steps),
        "domains": _each(steps, "by_domain"),
        "tags": _each(steps, "by_tag"),
        "staleness": _ages(steps),
        "mismatch": [_of_cause(steps, cause) for cause in _CAUSES],
        "stale": _stale(steps, ended),
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
        "held_out": [_held_out(name, event) for name, event in view.evaluations.items()],
        "ledger": view.ledger,
        "incidents": [dict(each) for each in islice(reversed(view.incidents), 50)],
    }


def _overall(steps: Sequence[Event]) -> dict[str, Any]:
    seconds = sum((number(step, "step_s") or 0.0) + (number(step, "wait_s") or 0.0) for step in steps)
    rollouts = sum(number(step, "rollouts") or 0.0 for step in steps)
    tokens = sum(number(step, "sampled_tokens") or 0.0 for step in steps)
    return {
        "reward": estimate(steps, "reward"),
        "accuracy": estimate(steps, "accuracy", share=True)
        or estimate([each for step in steps for each in _by(step, "by_domain").values()], "accuracy", share=True),
        "length": _mean(steps, "length_mean"),
        "truncated": _mean(steps, "truncated"),
        "entropy": _mean(steps, "entropy"),
        "tokens_per_s": tokens / seconds if seconds else None,
        "rollouts_per_s": rollouts / seconds if seconds else None,
    }


def _each(steps: Sequence[Event], field: str) -> list[dict[str, Any]]:
    by_name: dict[str, list[Figures]] = {}
    for step in steps:
        for name, figures in _by(step, field).items():
            by_name.setdefault(name, []).append(figures)
    return [_group(name, each) for name, each in sorted(by_name.items())]


def _group(name: str, figures: Sequence[Figures]) -> dict[str, Any]:
    stale = sum(number(each, "stale_groups") or 0.0 for each in figures)
    arrived = stale + sum(number(each, "groups") or 0.0 for each in figures)
    row = {figure: _mean(figures, figure) for figure in _MEANS}
    row |= {figure: _sum(figures, figure) for figure in _SUMS}
    return {
        "name": name,
        "rollouts": sum(number(each, "rollouts") or 0.0 for each in figures),
        "reward": estimate(figures, "reward"),
        "accuracy": estimate(figures, "accuracy", share=True),
        "stale": stale / arrived if arrived else None,
        "verifier_s": _mean(figures, "verifier_s", weight="verified"),
        "environment_s": _mean(figures, "environment_s", weight="episodes"),
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
                shares[age] = shares.get(age, 0.0) + tokens * (number(step, name) or 0.0)
    total = sum(shares.values())
    ages = sorted(shares, key=lambda age: (len(age.partition("_")[0]), age))
    return [{"age": age, "share": shares[age] / total} for age in ages] if total else []


def _of_cause(steps: Sequence[Event], cause: str) -> dict[str, Any]:
    row: dict[str, Any] = {"cause": cause}
    for figure in _OF_CAUSE:
        name = f"mismatch_{cause}_{figure}"
        if figure == "share":  # a step without this field has a share of zero
            weights = [number(step, "sampled_tokens") or 0.0 for step in steps]
            total = sum(weights)
            parts = zip(steps, weights, strict=True)
            row[figure] = sum((number(s, name) or 0.0) * w for s, w in parts) / total if total else None
        elif figure == "max":
            row[figure] = max((v for step in steps if (v := number(step, name)) is not None), default=None)
        else:
            row[figure] = _mean(steps, name, weight="sampled_tokens")
    return row


def _stale(steps: Sequence[Event], ended: Counter[str]) -> dict[str, Any]:
    domains = [figures for step in steps for figures in _by(step, "by_domain").values()]
    stale = sum(number(each, "stale_groups") or 0.0 for each in domains)
    arrived = stale + sum(number(each, "groups") or 0.0 for each in domains)
    given_up = float(ended["given up by an actor"])
    by_cause = {"dropped by the trainer": max(0.0, stale - given_up), "given up by an actor": given_up}
    return {
        "groups": stale,
        "share": stale / arrived if arrived else None,
        "by_cause": [{"cause": cause, "groups": groups} for cause, groups in by_cause.items()],
    }


def _waits(steps: Sequence[Event], view: RunView) -> list[dict[str, Any]]:
    """Return how many seconds the steps spent in each activity; verification and update pauses overlap with others."""
    stepping = sum(number(step, "step_s") or 0.0 for step in steps)
    waited = sum(number(step, "wait_s") or 0.0 for step in steps)
    wall = stepping + waited
    if len(steps) > 1:
        first, last = number(steps[0], "elapsed_s"), number(steps[-1], "elapsed_s")
        if first is not None and last is not None:
            wall = max(wall, last - first)
    verified = sum(
        (number(each, "verifier_s") or 0.0) * (number(each, "verified") or 0.0)
        for step in steps
        for each in _by(step, "by_domain").values()
    )
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


def _held_out(name: str, event: Event) -> dict[str, Any]:
    fields = {field: event.get(field) for field in ("accuracy", "low", "high", "problems")}
    return {"name": name, "version": event.get("model_version"), **fields}


def estimate(figures: Sequence[Figures], name: str, *, share: bool = False) -> dict[str, float | None] | None:
    """Return the rollout-weighted mean of the metric `name`, with its 95 % interval; None if no step has it."""
    pairs = [
        (value, weight)
        for each in figures
        if (value := number(each, name)) is not None and (weight := number(each, "rollouts") or 0.0) > 0
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


def number(figures: Figures, name: str) -> float | None:
    """Return the field `name` as a float; None unless it is a finite number."""
    value = figures.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool) or not -1e300 < value < 1e300:
        return None
    return float(value)


def _mean(figures: Iterable[Figures], name: str, *, weight: str = "rollouts") -> float | None:
    pairs = [(value, number(each, weight) or 0.0) for each in figures if (value := number(each, name)) is not None]
    total = sum(of for _, of in pairs)
    return sum(value * of for value, of in pairs) / total if total else None


def _sum(figures: Iterable[Figures], name: str) -> float | None:
    known = [value for each in figures if (value := number(each, name)) is not None]
    return sum(known) if known else None


def _median(steps: Sequence[Event], name: str) -> float | None:
    known = [value for step in steps if (value := number(step, name)) is not None]
    return median(known) if known else None


def _by(step: Event, field: str) -> Mapping[str, Figures]:
    figures = step.get(field)
    return {name: each for name, each in figures.items() if isinstance(each, dict)} if isinstance(figures, dict) else {}
