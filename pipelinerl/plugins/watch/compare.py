"""`pipelinerl compare` and `pipelinerl runs`: several runs side by side, and the list of the runs in a folder."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import typer

from pipelinerl.config import recipe as recipes
from pipelinerl.errors import UserError
from pipelinerl.observability.events import flat_keys
from pipelinerl.observability.logs import table_without_secrets

#: Maximum number of runs that a folder of runs stands for.
MOST_RUNS: Final = 16


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Directories of two or more runs, or a folder of runs.")],
) -> None:
    """Show runs side by side: results, and the settings in which their recipes differ."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pipelinerl.commands.remote import recorded_events
    from pipelinerl.observability.progress import sparkline
    from pipelinerl.observability.run_history import tell
    from pipelinerl.observability.summary import summary_rows
    from pipelinerl.observability.usage import usage_rows

    run_dirs = expanded(run_dirs)
    if len(run_dirs) < 2:
        raise UserError(f"compare needs two runs or more, got {run_dirs[0]}; name another, such as runs/tiny-2")
    configs = [recipes.load_run(run_dir) for run_dir in run_dirs]
    histories = [tell(recorded_events(run_dir)) for run_dir in run_dirs]
    summaries = []
    for run_dir, history in zip(run_dirs, histories, strict=True):
        curves = {}
        for name, events in history.evaluation_sets.items():
            values = history.series(events, "accuracy", x="model_version").y
            if len(values) > 1:
                drawn = sparkline(values, width=24)
                curves[f"{name} over the run"] = f"{values[0]:.1%} {drawn} {values[-1]:.1%}"
        summaries.append({**dict(summary_rows(history)), **curves, **dict(usage_rows(run_dir))})
    table = Table("", *(str(run_dir) for run_dir in run_dirs))
    for name in dict.fromkeys(name for summary in summaries for name in summary):
        table.add_row(name, *(Text(summary.get(name, "–")) for summary in summaries))
    table.add_section()
    tables, made = (
        [table_without_secrets(recipes.to_table(c, without_defaults=least)) for c in configs] for least in (False, True)
    )
    for each in differences(tables, made):
        table.add_row(each["path"], *(Text("–" if value is None else str(value)) for value in each["values"]))
    Console().print(table)


def runs(
    folder: Annotated[Path, typer.Argument(help="Folder that holds the directories of runs.")] = Path("runs"),
) -> None:
    """List the runs of a folder, newest first: state, start, steps, accuracy and reward."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pipelinerl.commands.remote import started_by_hand
    from pipelinerl.observability.events import Event, amount, read_events
    from pipelinerl.observability.run_history import tell
    from pipelinerl.observability.status import format_duration

    table = Table("run", "state", "began", "steps", "took", "held out", "reward")
    for run_dir in runs_in(folder):
        try:
            events: list[Event] = read_events(run_dir / "events.jsonl")
        except OSError:
            events = []
        history = tell(events)
        last, began = history.last_evaluation or {}, history.started.get("time")
        if history.finished is not None:
            state = str(history.finished["kind"]).removeprefix("run_")
        else:
            state = "live" if started_by_hand(run_dir) else "crashed" if history.started else "not started"
        row = (
            str(run_dir),
            state,
            time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if isinstance(began, int | float) else "–",
            f"{len(history.steps):,}",
            format_duration(max((amount(event, "elapsed_s") for event in events), default=0.0)),
            "–" if last.get("accuracy") is None else f"{last['accuracy']:.1%}",
            "–" if history.last_reward is None else f"{history.last_reward:.3f}",
        )
        table.add_row(*map(Text, row))
    if not table.rows:
        raise UserError(f"{folder} holds no runs; `pipelinerl run` makes one, and run.directory says where")
    Console().print(table)


def runs_in(folder: Path) -> list[Path]:
    """Return the directories of the runs in a folder, the run with the newest events first."""

    def changed_at(run_dir: Path) -> float:
        path = run_dir / "events.jsonl"
        return (path if path.is_file() else run_dir).stat().st_mtime

    return sorted((path.parent for path in folder.glob("*/recipe.toml")), key=changed_at, reverse=True)


def expanded(run_dirs: Sequence[Path]) -> list[Path]:
    """Return the directories, with the newest runs of a folder in place of a folder that holds runs."""
    return [
        each
        for path in run_dirs
        for each in ([path] if (path / "recipe.toml").is_file() else runs_in(path)[:MOST_RUNS] or [path])
    ]


def differences(recipes: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys that differ between recipes, with each recipe's value or None; defaults are left out."""
    flat = [dict(flat_keys(recipe)) for recipe in recipes]
    paths = sorted({path for each in made for path, _ in flat_keys(each)})
    return [
        {"path": path, "values": [each.get(path) for each in flat]}
        for path in paths
        if len({msgspec.json.encode(each.get(path)) for each in flat}) > 1
    ]
