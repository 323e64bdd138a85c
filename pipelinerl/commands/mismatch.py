"""`pipelinerl mismatch`: how far the log-probs of a run's trainer and sampler differ, why, and how to reduce it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from pipelinerl.commands.recorded_run import recorded_events
from pipelinerl.errors import UserError
from pipelinerl.numerics.causes import Cause
from pipelinerl.numerics.review import COMPARED, FIGURES, CauseReview, MetricSeries, Review, advise, review
from pipelinerl.observability.charts import draw_mismatch
from pipelinerl.observability.run_history import RunHistory, tell


def show(run_dir: Path, console: Console, *, as_json: bool) -> None:
    """Print the mismatch of the run in `run_dir`, live or finished, and draw `mismatch.png` into that directory.

    Raises:
        UserError: there is no run, or no step of it was measured.
    """
    history = _history(run_dir)
    reviewed = review(history)
    if reviewed is None:
        raise UserError(
            f"{run_dir} has {len(history.steps)} steps, none with mismatch figures; they begin with the first "
            "step whose rollouts have a gradient"
        )
    picture = draw_mismatch(history, run_dir / "mismatch.png")
    advice = advise(reviewed)
    if as_json:
        record = reviewed.as_dict() | {"advice": [asdict(each) for each in advice], "picture": str(picture)}
        console.print_json(json.dumps(record))
        return
    for table in _tables(reviewed):
        console.print(table)
    for each in advice:
        console.print(f"\n[bold]{each.finding}[/]", highlight=False)
        console.print(f"  do       {each.do}\n  because  {each.because}", highlight=False, markup=False)
    if not advice:
        console.print("\n[bold]nothing to do[/]: all figures are within the accepted range", highlight=False)
    console.print(f"\npicture {picture}", highlight=False, soft_wrap=True)


def _history(run_dir: Path) -> RunHistory:
    events = recorded_events(run_dir)
    if not events:
        raise UserError(f"{run_dir} has no events yet; is the run starting?")
    return tell(events)


def _tables(reviewed: Review) -> Iterator[Table]:
    by_prefix: Mapping[str, Mapping[Cause, CauseReview]] = {"mismatch": reviewed.current, "old_mismatch": reviewed.old}
    for prefix, causes in by_prefix.items():
        if causes:
            yield _by_cause(f"{COMPARED[prefix]} − behavior, {reviewed.steps:,} steps", causes)
    cuts = Table("age, versions", "tokens", "clipped", "truncated", "masked", title="cut by the objective")
    for age, shares in reviewed.ages.items():
        values = (shares.get(name) for name in ("share", "clipped", "truncated", "masked"))
        cuts.add_row(age.replace("_", "–"), *("" if value is None else f"{value:.2%}" for value in values))
    yield cuts
    if reviewed.rounding is not None:
        seen = reviewed.rounding
        rounding = Table("share of an update", "start", "middle", "end", "steps behind", title="seen after rounding")
        cells = (f"{value:.0%}" for value in (seen.share.start, seen.share.middle, seen.share.end))
        rounding.add_row("", *cells, f"{max(0.0, seen.behind):.1f} at step {seen.worst_step:,}")
        yield rounding


def _by_cause(title: str, causes: Mapping[Cause, CauseReview]) -> Table:
    table = Table("cause", "figure", "start", "middle", "end", "worst", "at step", title=title)
    for cause in causes.values():
        table.add_section()
        for number, (name, course) in enumerate(cause.figures.items()):
            label = f"{cause.cause}, {cause.share:.0%} of tokens" if number == 0 else ""
            table.add_row(label, FIGURES[name], *_cells(name, course))
    return table


def _cells(name: str, course: MetricSeries) -> tuple[str, ...]:
    values = (course.start, course.middle, course.end, course.worst)
    shown = (f"{value:.2%}" if name == "contradictions" else f"{value:.3g}" for value in values)
    return (*shown, f"{course.worst_step:,}")
