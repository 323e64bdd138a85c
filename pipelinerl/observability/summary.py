"""The summary of a run in a few lines: how it ended, accuracy, reward, pace, staleness and update pauses."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from pipelinerl.observability.evaluations import interval, note, pass_at_words, weights
from pipelinerl.observability.run_history import RunHistory
from pipelinerl.observability.status import format_duration, format_milliseconds, reward_words, staleness_words
from pipelinerl.observability.usage import usage_rows


def summary_rows(history: RunHistory) -> list[tuple[str, str]]:
    """Return the run's summary as pairs (name, value), without values that were not measured."""
    rows = [("outcome", outcome(history))]
    evaluation, first = history.last_evaluation, history.first_accuracy
    if evaluation is not None:
        bounds = interval(evaluation.get("low"), evaluation.get("high"))
        problems = f" on {evaluation['problems']:,} problems" if evaluation.get("problems") else ""
        rows.append(
            (
                "held-out accuracy",
                f"{_change(first, evaluation['accuracy'], '.1%')}{f' (95 %: {bounds})' if bounds else ''}{problems}",
            )
        )
        details = (pass_at_words(evaluation), weights(evaluation), note(evaluation))
        if shown := "; ".join(detail for detail in details if detail):
            rows.append(("last evaluation", shown))
    rows += [(name, _change(begun, ended, ".1%")) for name, begun, ended in history.other_accuracies]
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
        updates = f"{len(history.publications):,} weight updates"
        rows.append(
            (
                "update pause",
                f"{format_milliseconds(pause)} typically, {format_milliseconds(longest)} at most, {updates}",
            )
        )
    if history.checkpoint:
        rows.append(("newest checkpoint", history.checkpoint))
    return rows


def _change(first: float | None, last: float, form: str) -> str:
    return format(last, form) if first is None else f"{first:{form}} → {last:{form}}"


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
