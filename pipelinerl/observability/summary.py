"""The end of a run in a few lines for the terminal: what was learned, how fast, how far off-policy, where to look."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table
from rich.text import Text

from pipelinerl.observability.evaluations import note, pass_at_words, weights
from pipelinerl.observability.status import format_duration
from pipelinerl.observability.story import Story


def summary_rows(story: Story) -> list[tuple[str, str]]:
    """Name and value of each line; what was never measured is left out."""
    rows = [("outcome", outcome(story))]
    evaluation, first = story.last_evaluation, story.first_accuracy
    if evaluation is not None and first is not None:
        low, high = evaluation.get("low"), evaluation.get("high")
        interval = f" (95 %: {low:.1%} to {high:.1%})" if low is not None and high is not None else ""
        problems = f" on {evaluation['problems']:,} problems" if evaluation.get("problems") else ""
        rows.append(("held-out accuracy", f"{first:.1%} → {evaluation['accuracy']:.1%}{interval}{problems}"))
        details = (pass_at_words(evaluation), weights(evaluation), note(evaluation))
        if said := "; ".join(detail for detail in details if detail):
            rows.append(("last evaluation", said))
    if story.first_reward is not None and story.last_reward is not None:
        rows.append(("mean reward", f"{story.first_reward:.3f} → {story.last_reward:.3f}"))
    if story.steps and story.duration_s > 0:
        pace = f"{len(story.steps) / story.duration_s * 60:.1f} a minute"
        rows.append(("steps", f"{len(story.steps):,} in {format_duration(story.duration_s)}, {pace}"))
        rate = story.sampled_tokens / story.duration_s
        rows.append(("tokens sampled", f"{story.sampled_tokens:,}, {rate:,.0f} a second"))
    mean, most = story.typical(story.steps, "staleness_mean"), story.most(story.steps, "staleness_max")
    if mean is not None and most is not None:
        rows.append(("staleness", f"{mean:.1f} versions typically, {most:.0f} at most"))
    pause, longest = story.typical(story.publications, "pause_s"), story.most(story.publications, "pause_s")
    if pause is not None and longest is not None:
        updates = f"{len(story.publications):,} weight updates"
        rows.append(("update pause", f"{_short(pause)} typically, {_short(longest)} at most, {updates}"))
    return rows


def summary(story: Story, *, run_dir: Path, report: Path | None = None) -> Table:
    """The lines as a table for rich, with where to look further."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    for name, value in summary_rows(story):
        grid.add_row(name, Text(value, style="bold" if name in ("held-out accuracy", "mean reward") else ""))
    grid.add_row("run", str(run_dir))
    if report is not None:
        grid.add_row("report", str(report))
    return grid


def outcome(story: Story) -> str:
    """How it ended, in words."""
    if story.finished is None:
        return "not finished"
    return str(story.finished.get("reason") or "finished")


def _short(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
