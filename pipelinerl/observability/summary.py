"""The summary of a run in a few lines: how it ended, accuracy, reward, pace, staleness and update pauses.

Events of older runs lack some fields; missing values are skipped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from pipelinerl.observability.events import Event
from pipelinerl.observability.run_history import RunHistory
from pipelinerl.observability.status import format_duration, format_milliseconds, reward_words, staleness_words
from pipelinerl.observability.usage import usage_rows


def summary_rows(history: RunHistory) -> list[tuple[str, str]]:
    """Return the run's summary as pairs (name, value), without values that were not measured."""

    def change(first: float | None, last: float) -> str:
        return f"{last:.1%}" if first is None else f"{first:.1%} → {last:.1%}"

    rows = [("outcome", outcome(history))]
    if (evaluation := history.last_evaluation) is not None:
        bounds = interval(evaluation)
        problems = f" on {evaluation['problems']:,} problems" if evaluation.get("problems") else ""
        accuracy = change(history.first_accuracy, evaluation["accuracy"])
        rows.append(("held-out accuracy", f"{accuracy}{f' (95 %: {bounds})' if bounds else ''}{problems}"))
        chances = ", ".join(f"pass@{each['k']} {each['value']:.1%}" for each in evaluation.get("pass_at") or ())
        if shown := "; ".join(filter(None, (chances, weights(evaluation), note(evaluation)))):
            rows.append(("last evaluation", shown))
    rows += [(name, change(begun, ended)) for name, begun, ended in history.other_accuracies]
    if history.last_reward is not None:
        begun = "" if history.first_reward is None else f"{history.first_reward:.3f} → "
        rows.append(("mean reward", begun + reward_words(history.last_reward, history.unjudged)))
    if history.steps and history.duration_s > 0:
        pace = f"{len(history.steps) / history.duration_s * 60:.1f} a minute"
        rows.append(("steps", f"{len(history.steps):,} in {format_duration(history.duration_s)}, {pace}"))
        rate = history.sampled_tokens / history.duration_s
        rows.append(("tokens sampled", f"{history.sampled_tokens:,}, {rate:,.0f} a second"))
    mean, most = history.median(history.steps, "staleness_mean"), history.max_of(history.steps, "staleness_max")
    if mean is not None and most is not None:
        rows.append(("staleness", staleness_words(mean, most)))
    if lag := history.steps and history.steps[-1].get("lag"):
        rows.append(("lag at the end", str(lag)))
    pause, longest = history.median(history.publications, "pause_s"), history.max_of(history.publications, "pause_s")
    if pause is not None and longest is not None:
        pauses = f"{format_milliseconds(pause)} typically, {format_milliseconds(longest)} at most"
        rows.append(("update pause", f"{pauses}, {len(history.publications):,} weight updates"))
    if history.checkpoint:
        rows.append(("newest checkpoint", history.checkpoint))
    return rows


def summary(history: RunHistory, *, run_dir: Path, report: Path | None = None) -> Table:
    """Return the summary as a rich table, with the paths of the run and the report."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in (*summary_rows(history), *usage_rows(run_dir)):
        grid.add_row(name, Text(value, style="bold" if name in ("held-out accuracy", "mean reward") else ""))
    grid.add_row("run", str(run_dir))
    if report is not None:
        grid.add_row("report", str(report))
    return grid


def outcome(history: RunHistory) -> str:
    """Return the reason why the run ended, or "not finished"."""
    if history.finished is None:
        return "not finished"
    return str(history.finished.get("reason") or "finished")


def interval(estimate: Mapping[str, Any]) -> str:
    """Format the 95 % interval of an estimate, its fields `low` and `high`, as `61.2% to 70.1%`; empty if unknown."""
    low, high = estimate.get("low"), estimate.get("high")
    return "" if low is None or high is None else f"{low:.1%} to {high:.1%}"


def weights(evaluation: Event) -> str:
    """Name the model versions that generated the answers: `v50 alone` if pinned to one version, else `v48 to v51`."""
    oldest, newest = evaluation.get("version_min"), evaluation.get("version_max")
    if oldest is None or newest is None:
        return ""
    mixed = f"v{oldest}" if oldest == newest else f"v{oldest} to v{newest}"
    how = {"engine": f"v{oldest} alone, on {evaluation.get('engine')}", "gate": f"v{oldest} alone"}
    return how.get(str(evaluation.get("pin")), mixed)


def note(evaluation: Event) -> str:
    """Return an evaluation's caveats as text, such as discarded answers and training steps during the evaluation."""
    counts = ("discarded", "answers of other versions discarded"), ("restarts", "restarts"), ("unjudged", "unjudged")
    parts = [f"{evaluation[name]} {words}" for name, words in counts if evaluation.get(name)]
    if evaluation.get("steps_meanwhile"):
        parts.append(f"the trainer took {evaluation['steps_meanwhile']} steps meanwhile")
    if evaluation.get("truncated"):
        parts.append(f"{evaluation['truncated']:.1%} of the samples truncated")
    if evaluation.get("incomplete"):
        parts.append(f"incomplete: {evaluation['incomplete']}")
    return "; ".join(parts)
