"""The command `pipelinerl replay`, which `cli` registers: reads the arguments, and imports what does the work."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer


def replay(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run that has ended, such as runs/tiny.")],
    step: Annotated[int, typer.Option(help="The step to take again.")],
    objective: Annotated[str | None, typer.Option(help="A preset to take that step with instead.")] = None,
) -> None:
    """Take a step again from its checkpoint and its recorded rollouts, with no engine; status 1 if it differs."""
    from rich.console import Console

    from pipelinerl.config.recipe import load

    # Before torch is imported: sums depend on how many threads make them, and the launcher gave the trainer so many.
    os.environ.setdefault("OMP_NUM_THREADS", str(load(str(run_dir / "recipe.toml")).launch.threads))
    from pipelinerl.commands.replay import show

    if not show(run_dir, step=step, objective=objective, console=Console()):
        raise typer.Exit(1)
