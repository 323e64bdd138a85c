"""Figures per domain and tag from step events: a table over the last steps, and curves.

Runs of older versions lack these figures; missing values are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pipelinerl.observability.charts import Chart, Line
from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import RunHistory, Series
from pipelinerl.observability.samples.visible import one_line

#: The page defines this many colours; further domains appear in the table only.
_COLOURS: Final = 3
_CALLS: Final = ("calls_parsed", "tool_errors", "calls_malformed")
#: Number of last steps that the table covers.
_STEPS: Final = 10

DOMAIN_HEAD: Final = (
    "last steps",
    "rollouts",
    "reward",
    "right",
    "tokens",
    "P95",
    "truncated",
    "unjudged",
    "all right",
    "all wrong",
    "stale",
    "verifier",
)


EPISODE_HEAD: Final = (
    "last steps",
    "turns",
    "segments",
    "seconds outside the model",
    "calls",
    "failed",
    "malformed",
)


def episode_rows(history: RunHistory) -> list[tuple[str, ...]]:
    """Return a row under `EPISODE_HEAD` per domain of episodes: means per episode, and sums of calls."""
    rows = []
    steps = history.steps[-_STEPS:]
    for name in sorted({name for step in steps for name in _by(step, "by_domain")}):
        figures = [_by(step, "by_domain")[name] for step in steps if name in _by(step, "by_domain")]
        if (turns := mean_of(figures, "turns")) is None:
            continue
        segments, seconds = mean_of(figures, "segments"), mean_of(figures, "environment_s", weight="episodes")
        calls = (sum(each.get(kind, 0) for each in figures) for kind in _CALLS)
        means = ("–" if value is None else f"{value:.3g}" for value in (turns, segments, seconds))
        rows.append((one_line(name), *means, *(f"{count:,.0f}" for count in calls)))
    return rows


def domain_rows(history: RunHistory) -> list[tuple[str, ...]]:
    """Return a row per domain, then per tag, under `DOMAIN_HEAD`: means over the last steps, weighted by rollouts."""
    steps = history.steps[-_STEPS:]
    rows = []
    for field in ("by_domain", "by_tag"):
        names = sorted({name for step in steps for name in _by(step, field)})
        rows += [_row(name, [_by(step, field)[name] for step in steps if name in _by(step, field)]) for name in names]
    return rows


def domain_charts(history: RunHistory) -> list[tuple[str, Chart]]:
    """Return (title, chart) of the main figures, with a line for each of the first `_COLOURS` domains."""

    def lines(figure: str) -> tuple[Line, ...]:
        names = sorted({name for step in history.steps for name in _by(step, "by_domain")})[:_COLOURS]
        return tuple(
            Line(series=_course(history, name, figure), label=name, colour=colour)
            for colour, name in enumerate(names, start=1)
        )

    steps = history.by_step
    return [
        (
            "Entropy, nats per token",
            Chart(
                lines=(
                    Line(series=steps("entropy"), label="of the sampled tokens"),
                    Line(series=steps("exact_entropy"), label="exact", colour=2),
                ),
                x_label="step",
            ),
        ),
        (
            "Answer length, tokens",
            Chart(
                lines=(
                    Line(series=steps("length_mean"), label="mean"),
                    Line(series=steps("length_p95"), label="P95", colour=2),
                ),
                x_label="step",
            ),
        ),
        (
            "Reward by domain, smoothed",
            Chart(
                lines=tuple(replace(each, series=each.series.smoothed()) for each in lines("reward")), x_label="step"
            ),
        ),
        ("Accuracy by domain", Chart(lines=lines("accuracy"), x_label="step", percent=True, y_max=1.0)),
        ("Mean length by domain", Chart(lines=lines("length_mean"), x_label="step")),
        ("Share truncated by domain", Chart(lines=lines("truncated"), x_label="step", percent=True)),
        ("Share stale by domain", Chart(lines=lines("stale"), x_label="step", percent=True)),
    ]


def mean_of(figures: Sequence[Mapping[str, Any]], name: str, *, weight: str = "rollouts") -> float | None:
    """Return the mean of a figure, weighted by `weight`; None if no step has the figure."""
    pairs = [(float(each[name]), float(each.get(weight) or 0.0)) for each in figures if each.get(name) is not None]
    total = sum(of for _, of in pairs)
    return sum(value * of for value, of in pairs) / total if total else None


def _row(name: str, figures: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    def share(figure: str) -> str:
        value = mean_of(figures, figure)
        return "–" if value is None else f"{value:.1%}"

    def number(figure: str, form: str) -> str:
        value = mean_of(figures, figure)
        return "–" if value is None else format(value, form)

    parts = sorted({key.removeprefix("reward.") for each in figures for key in each if key.startswith("reward.")})
    reward = ", ".join(
        [number("reward", ".3f"), *(f"{one_line(part)} {number(f'reward.{part}', '.3f')}" for part in parts)]
    )
    stale = sum(each.get("stale_groups", 0) for each in figures)
    arrived = stale + sum(each.get("groups", 0) for each in figures)
    seconds = mean_of(figures, "verifier_s", weight="verified")
    errors = sum(each.get("verifier_errors", 0) for each in figures)
    verifier = "–" if seconds is None else f"{seconds * 1e3:.3g} ms" + (f", {errors:.0f} errors" if errors else "")
    rollouts = sum(each.get("rollouts", 0) for each in figures)
    return (
        one_line(name),
        f"{rollouts:,.0f}",
        reward,
        share("accuracy"),
        number("length_mean", ".1f"),
        number("length_p95", ".1f"),
        *(share(figure) for figure in ("truncated", "unjudged", "all_right", "all_wrong")),
        f"{stale / arrived:.1%}" if arrived else "–",
        verifier,
    )


def _course(history: RunHistory, domain: str, figure: str) -> Series:
    points = [(float(step["step"]), _by(step, "by_domain").get(domain, {}).get(figure)) for step in history.steps]
    known = [(x, float(y)) for x, y in points if isinstance(y, int | float)]
    return Series(tuple(x for x, _ in known), tuple(y for _, y in known))


def _by(step: Event, field: str) -> Mapping[str, Mapping[str, Any]]:
    figures = step.get(field)
    return figures if isinstance(figures, dict) else {}
