"""Recorded training steps: `pipelinerl replay` repeats one, and `pipelinerl explain` evaluates an objective on one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Final

import typer

from pipelinerl.component import CommandComponent
from pipelinerl.config import recipe as recipes

REPLAY: Final = CommandComponent(
    build="pipelinerl.plugins.replay:replay",
    help="Repeat a step from its checkpoint and recorded rollouts, without engines; exit status 1 if it differs.",
)
EXPLAIN: Final = CommandComponent(
    build="pipelinerl.plugins.replay.explain:explain",
    help="Explain an objective: its five terms (slots), formula, cost and source, and its effect on given rollouts.",
)


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
