"""The command `pipelinerl explain`, which `cli` registers: reads the arguments, and imports what does the work."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def explain(
    choice: Annotated[
        str | None, typer.Argument(metavar="PRESET|RECIPE", help="An algorithm, or a recipe (default: lists them).")
    ] = None,
    overrides: Annotated[list[str] | None, typer.Argument(help="Changes to the recipe: section.key=value …")] = None,
    rollout: Annotated[
        list[Path] | None, typer.Option(help="Rollouts (JSON, or a group's record); shows each token's factors.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="A run that has ended: rollouts of one of its steps.")] = None,
    step: Annotated[int | None, typer.Option(help="The step of that run.")] = None,
    group: Annotated[int | None, typer.Option(help="Shows of that step this order's group alone.")] = None,
) -> None:
    """What an objective is: its five slots, formula, cost and source; and what it makes of given rollouts."""
    from rich.console import Console

    from pipelinerl.commands.explain import OfRun, catalogue, show

    if (run is None) != (step is None) or (group is not None and run is None):
        raise typer.BadParameter("--run and --step belong together, and --group to both")
    if rollout and choice is None:
        raise typer.BadParameter("name the algorithm or recipe by which the rollouts are to be explained")
    if choice is None and run is None:
        catalogue(Console())
        return
    of_run = None if run is None or step is None else OfRun(run, step, group)
    show(choice or str(of_run and of_run.recipe), overrides or [], rollout or [], Console(), of_run=of_run)
