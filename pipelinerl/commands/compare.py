"""`pipelinerl compare`: the summaries of several runs side by side, and the settings in which their recipes differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from pipelinerl.config import recipe as recipes
from pipelinerl.errors import UserError
from pipelinerl.observability.logs import table_without_secrets


def compare(
    run_dirs: Annotated[list[Path], typer.Argument(help="Directories of two or more runs.")],
) -> None:
    """Show runs side by side: results, and the settings in which their recipes differ."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pipelinerl.commands.recorded_run import recorded_events
    from pipelinerl.observability.report import summary_rows
    from pipelinerl.observability.run_history import tell

    if len(run_dirs) < 2:
        raise UserError(f"compare needs two runs or more, got {run_dirs[0]}; name another, such as runs/tiny-2")
    configs = [recipes.load_run(run_dir) for run_dir in run_dirs]
    summaries = [dict(summary_rows(tell(recorded_events(run_dir)))) for run_dir in run_dirs]
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


def differences(recipes: Sequence[Mapping[str, Any]], made: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the keys whose values differ between recipes, each with its value in every recipe (None if missing).

    `made` holds the non-default settings of each recipe; keys that have their default in all recipes are left out.
    """
    flat = [dict(_flat(recipe, "")) for recipe in recipes]
    paths = sorted({path for each in made for path, _ in _flat(each, "")})
    return [
        {"path": path, "values": [each.get(path) for each in flat]}
        for path in paths
        if len({msgspec.json.encode(each.get(path)) for each in flat}) > 1
    ]


def _flat(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (dotted path, value) for each value in nested tables and lists; a table in a list goes by its `name`."""
    if isinstance(value, list) and value and all(isinstance(each, dict) and "name" in each for each in value):
        value = {str(each["name"]): each for each in value}
    if not isinstance(value, Mapping):
        yield path, value
        return
    for name, each in value.items():
        yield from _flat(each, f"{path}.{name}" if path else name)
