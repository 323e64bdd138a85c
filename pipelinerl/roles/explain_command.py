"""The command `pipelinerl explain`, which `cli` registers: reads the arguments, and imports what does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    choice: Annotated[
        str | None, typer.Argument(metavar="PRESET|RECIPE", help="An algorithm, or a recipe [default: lists them].")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")] = None,
    rollout: Annotated[
        list[Path] | None, typer.Option(help="Rollouts (JSON, or a group's record); shows each token's factors.")
    ] = None,
) -> None:
    """What an objective is: its five slots, formula, cost and source; and what it makes of given rollouts."""
    from rich.console import Console

    from pipelinerl.roles.explain import catalogue, show

    if choice is None:
        catalogue(Console())
    else:
        show(choice, overrides or [], rollout or [], Console())
