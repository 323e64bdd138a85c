"""The command `pipelinerl track`: export a run's metrics to TensorBoard, as the trackers of a live run do."""

from __future__ import annotations

import hashlib
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from pipelinerl import registry
from pipelinerl.errors import UserError
from pipelinerl.plugins.trackers.tracker import TensorBoardTracker, TrackerFeed
from pipelinerl.roles.role import RunPath


def track(
    run_dir: RunPath,
    tensorboard: Annotated[Path, typer.Option(help="Directory for event files that TensorBoard reads.")],
) -> None:
    """Export a run's metrics."""
    typer.echo(track_run(run_dir, tensorboard))


def track_run(run_dir: Path, directory: Path) -> str:
    """Add the events since the last call to TensorBoard files in `directory`; return a message or raise `UserError`."""
    if not (run_dir / "events.jsonl").is_file():
        raise UserError(f"{run_dir} is not a run: it has no events.jsonl")
    registry.find("trackers", registry.TRACKERS, "tensorboard")
    pieces, place = 0, directory.resolve()
    name = f"tensorboard-{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    try:
        with closing(TrackerFeed(run_dir, name, partial(TensorBoardTracker, place))) as feed:
            while feed.advance():
                pieces += 1
            over = feed.is_over
    except BlockingIOError as error:
        raise UserError(f"{error}; wait until it has ended") from None
    except ValueError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from None
    new = "" if pieces else "nothing new for "
    going = "" if over else "; the run is not over: repeat the command for later steps"
    return f"{new}{directory}; view it with: tensorboard --logdir {directory}{going}"
