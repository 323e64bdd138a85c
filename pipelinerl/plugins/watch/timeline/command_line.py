"""The commands `pipelinerl trace` and `mismatch`, for a live, finished or crashed run.

`trace` exports a timeline for Perfetto, to a draft file that is renamed once complete. `mismatch` shows how far the
log-probs of trainer and sampler differ, why, and how to reduce the difference.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from pipelinerl.commands.remote import recorded_events
from pipelinerl.errors import UserError
from pipelinerl.numerics.causes import Cause
from pipelinerl.observability.charts import png
from pipelinerl.observability.events import EventFollower
from pipelinerl.observability.run_history import tell
from pipelinerl.plugins.watch.report import mismatch_chart
from pipelinerl.plugins.watch.timeline.chrome_trace import ChromeTrace, write_trace
from pipelinerl.plugins.watch.timeline.review import (
    COMPARED,
    FIGURES,
    CauseReview,
    Review,
    advise,
    review,
)
from pipelinerl.roles.role import RunPath

#: Name of the trace file in the run's directory, unless the user gives another path.
DEFAULT_NAME: Final = "trace.json.gz"
#: Figures that `mismatch.png` draws, with the titles of their charts.
_PANELS: Final = {
    "p95": "P95 |Δ log-prob|, nats",
    "response_max": "Max |Δp| of a response, mean over responses",
    "ess": "Effective sample size, of 1",
    "share": "Share of the tokens",
}


def mismatch(
    run_dir: RunPath,
    as_json: Annotated[bool, typer.Option("--json", help="Print every figure and the advice as JSON.")] = False,
) -> None:
    """Print a run's mismatch and advice."""
    show_mismatch(run_dir, Console(soft_wrap=as_json), as_json=as_json)


def trace(
    run_dir: RunPath,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write (default: the run's trace.json.gz).")
    ] = None,
) -> None:
    """Export a run's timeline."""
    typer.echo(trace_run(run_dir, output))


def trace_run(run_dir: Path, output: Path | None) -> str:
    """Write the trace to `output` and return a message for the user; raise `UserError` if the run cannot be read."""
    log, path = run_dir / "events.jsonl", output or run_dir / DEFAULT_NAME
    if not log.is_file():
        raise UserError(f"{run_dir} is not a run: it has no events.jsonl")
    draft, trace = path.with_name(f"{path.name}.part"), ChromeTrace()
    try:
        zipped = path.suffix == ".gz"
        with gzip.open(draft, "wt", compresslevel=6, encoding="utf-8") if zipped else draft.open("w") as file:
            count = write_trace(trace, EventFollower(log).all(), file, run=run_dir.resolve().name)
        draft.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        draft.unlink(missing_ok=True)
    left_out = f"; {trace.left_out:,} groups found no free row" if trace.left_out else ""
    return f"{path}: {count:,} trace events{left_out}; open it at https://ui.perfetto.dev"


def show_mismatch(run_dir: Path, console: Console, *, as_json: bool) -> None:
    """Print a run's mismatch and draw `mismatch.png` into its directory; raise `UserError` if no step was measured."""
    events = recorded_events(run_dir)
    if not events:
        raise UserError(f"{run_dir} has no events yet; is the run starting?")
    history = tell(events)
    reviewed = review(history)
    if reviewed is None:
        raise UserError(
            f"{run_dir} has {len(history.steps)} steps, none with mismatch figures; they begin with the first "
            "step whose rollouts have a gradient"
        )
    try:
        picture = png([mismatch_chart(history, *each) for each in _PANELS.items()], run_dir / "mismatch.png")
    except ModuleNotFoundError:
        raise UserError("mismatch.png needs matplotlib, which is not installed; pip install -e '.[report]'") from None
    advice = advise(reviewed)
    if as_json:
        record = asdict(reviewed) | {"advice": [asdict(each) for each in advice], "picture": str(picture)}
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
            values = (course.start, course.middle, course.end, course.worst)
            shown = (f"{value:.2%}" if name == "contradictions" else f"{value:.3g}" for value in values)
            table.add_row(label, FIGURES[name], *shown, f"{course.worst_step:,}")
    return table
