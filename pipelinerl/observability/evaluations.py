"""Evaluation results from a run's events: tables, curves of pass@k, and the model versions that were sampled.

Events of older runs lack some fields; missing values are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pipelinerl.observability.charts import Line, Mark
from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import RunHistory, Series

#: Number of line colours that the page defines; further lines in a chart use them again.
_COLOURS: Final = 3

HEAD: Final = ("step", "accuracy", "95 %", "pass@k", "problems × samples", "tokens", "weights", "note")
GROUPS_HEAD: Final = ("", "problems", "accuracy", "95 %", "pass@k, maj@k", "tokens", "truncated")


def evaluation_rows(evaluations: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return a table row for each evaluation of one set, with the columns `HEAD`."""
    return [
        (
            f"{event['model_version']}",
            "–" if event.get("accuracy") is None else f"{event['accuracy']:.1%}",
            _interval(event),
            _chances(event),
            f"{event.get('problems', '?')} × {event.get('samples', 1)}",
            lengths(event),
            weights(event),
            note(event),
        )
        for event in evaluations
    ]


def group_rows(evaluations: Sequence[Event]) -> list[tuple[str, ...]]:
    """Return a table row for each domain, then for each tag, with the columns `GROUPS_HEAD`.

    The rows come from the last evaluation that reports domains.
    """
    known = [event for event in evaluations if event.get("by_domain")]
    if not known:
        return []
    return [
        (
            f"{what} {name}",
            f"{figures['problems']}",
            "–" if figures.get("accuracy") is None else f"{figures['accuracy']:.1%}",
            _interval(figures),
            _chances(figures),
            lengths(figures),
            "" if figures.get("truncated") is None else f"{figures['truncated']:.1%}",
        )
        for what in ("domain", "tag")
        for name, figures in known[-1].get(f"by_{what}", {}).items()
    ]


def accuracy_lines(history: RunHistory) -> tuple[Line, ...]:
    """Return a chart line per evaluation set: accuracy by step, with intervals. Empty if there is only one set."""
    if len(history.evaluation_sets) < 2:
        return ()
    lines = []
    for number, (name, events) in enumerate(history.evaluation_sets.items()):
        accuracy, low, high = history.accuracy(events)
        colour = 1 + number % _COLOURS
        lines.append(Line(series=accuracy, label=name, colour=colour, mark=Mark.DOTS, low=low, high=high))
    return tuple(lines)


def pass_at_lines(evaluations: Sequence[Event]) -> tuple[Line, ...]:
    """Return a chart line for each k: pass@k of one set by step, with intervals."""
    points: dict[int, list[tuple[float, Mapping[str, Any]]]] = {}
    for event in evaluations:
        for each in _pass_at(event):
            points.setdefault(each["k"], []).append((float(event["model_version"]), each))
    return tuple(
        Line(
            series=Series(tuple(x for x, _ in estimates), tuple(float(each["value"]) for _, each in estimates)),
            label=f"pass@{k}",
            colour=1 + number % _COLOURS,
            mark=Mark.DOTS,
            low=tuple(float(each["low"]) for _, each in estimates),
            high=tuple(float(each["high"]) for _, each in estimates),
        )
        for number, (k, estimates) in enumerate(sorted(points.items()))
    )


def pass_at_words(event: Event) -> str:
    """Format the pass@k of an `evaluation` event as `pass@1 61.2%, pass@8 90.1%`; empty if unknown."""
    return ", ".join(f"pass@{each['k']} {each['value']:.1%}" for each in _pass_at(event))


def lengths(figures: Mapping[str, Any]) -> str:
    """Format the mean and the P95 of answer lengths in tokens as `212, P95 512`; empty if unknown."""
    mean, p95 = figures.get("length_mean"), figures.get("length_p95")
    return "" if mean is None or p95 is None else f"{mean:.0f}, P95 {p95:.0f}"


def weights(event: Event) -> str:
    """Name the model versions that generated the answers: `v50 alone` if pinned to one version, else `v48 to v51`."""
    oldest, newest = event.get("version_min"), event.get("version_max")
    if oldest is None or newest is None:
        return ""
    mixed = f"v{oldest}" if oldest == newest else f"v{oldest} to v{newest}"
    how = {"engine": f"v{oldest} alone, on {event.get('engine')}", "gate": f"v{oldest} alone"}
    return how.get(str(event.get("pin")), mixed)


def note(event: Event) -> str:
    """Return an evaluation's caveats as text, such as discarded answers and training steps during the evaluation."""
    counts = ("discarded", "answers of other versions discarded"), ("restarts", "restarts"), ("unjudged", "unjudged")
    parts = [f"{event[name]} {words}" for name, words in counts if event.get(name)]
    if event.get("steps_meanwhile"):
        parts.append(f"the trainer took {event['steps_meanwhile']} steps meanwhile")
    if event.get("truncated"):
        parts.append(f"{event['truncated']:.1%} of the samples truncated")
    if event.get("incomplete"):
        parts.append(f"incomplete: {event['incomplete']}")
    return "; ".join(parts)


def _pass_at(event: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    estimates = event.get("pass_at")
    return estimates if isinstance(estimates, list) else []


def _chances(figures: Mapping[str, Any]) -> str:
    majority = figures.get("majority_at")
    return ", ".join(
        f"{name}{each['k']} {each['value']:.1%} ({_interval(each)})"
        for name, estimates in (("@", _pass_at(figures)), ("maj@", majority if isinstance(majority, list) else []))
        for each in estimates
    )


def interval(low: float | None, high: float | None) -> str:
    """Format a confidence interval as `61.2% to 70.1%`; empty if unknown."""
    return "" if low is None or high is None else f"{low:.1%} to {high:.1%}"


def _interval(estimate: Mapping[str, Any]) -> str:
    return interval(estimate.get("low"), estimate.get("high"))
