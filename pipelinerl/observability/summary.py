"""A short summary of a finished run for the terminal: learning, speed, staleness and file locations."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from pipelinerl.observability.evaluations import note, pass_at_words, weights
from pipelinerl.observability.run_history import RunHistory
from pipelinerl.observability.status import format_duration


def summary_rows(history: RunHistory) -> list[tuple[str, str]]:
    """Return (name, value) of each line; unmeasured values are omitted."""
    rows = [("outcome", outcome(history))]
    evaluation, first = history.last_evaluation, history.first_accuracy
    if evaluation is not None and first is not None:
        low, high = evaluation.get("low"), evaluation.get("high")
        interval = f" (95 %: {low:.1%} to {high:.1%})" if low is not None and high is not None else ""
        problems = f" on {evaluation['problems']:,} problems" if evaluation.get("problems") else ""
        rows.append(("held-out accuracy", f"{first:.1%} → {evaluation['accuracy']:.1%}{interval}{problems}"))
        details = (pass_at_words(evaluation), weights(evaluation), note(evaluation))
        if shown := "; ".join(detail for detail in details if detail):
            rows.append(("last evaluation", shown))
    rows += [(name, f"{begun:.1%} → {ended:.1%}") for name, begun, ended in history.other_accuracies]
    if history.first_reward is not None and history.last_reward is not None:
        rows.append(("mean reward", f"{history.first_reward:.3f} → {history.last_reward:.3f}"))
    if history.steps and history.duration_s > 0:
        pace = f"{len(history.steps) / history.duration_s * 60:.1f} a minute"
        rows.append(("steps", f"{len(history.steps):,} in {format_duration(history.duration_s)}, {pace}"))
        rate = history.sampled_tokens / history.duration_s
        rows.append(("tokens sampled", f"{history.sampled_tokens:,}, {rate:,.0f} a second"))
    mean, most = history.median(history.steps, "staleness_mean"), history.max_of(history.steps, "staleness_max")
    if mean is not None and most is not None:
        rows.append(("staleness", f"{mean:.1f} versions typically, {most:.0f} at most"))
    pause, longest = history.median(history.publications, "pause_s"), history.max_of(history.publications, "pause_s")
    if pause is not None and longest is not None:
        updates = f"{len(history.publications):,} weight updates"
        rows.append(("update pause", f"{_short(pause)} typically, {_short(longest)} at most, {updates}"))
    return rows


def summary(history: RunHistory, *, run_dir: Path, report: Path | None = None) -> Table:
    """Return the summary as a rich table, with the paths of the run and the report."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in summary_rows(history):
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


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
