"""`pipelinerl replay`: the number of threads is set before torch is imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl.config import recipe as recipes


def replay(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a finished run, such as runs/tiny.")],
    step: Annotated[int, typer.Option(help="The step to repeat.")],
    objective: Annotated[str | None, typer.Option(help="A preset to use for that step instead.")] = None,
) -> None:
    """Replay a step; exit status 1 if a metric differs from the record."""
    from rich.console import Console

    # Set before torch is imported: sums depend on the number of threads, so use the trainer's number.
    os.environ.setdefault("OMP_NUM_THREADS", str(recipes.load_run(run_dir).launch.threads))
    from pipelinerl.plugins.replay.replayed_run import show

    if not show(run_dir, step=step, objective=objective, console=Console()):
        raise typer.Exit(1)
