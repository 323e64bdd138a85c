"""`pipelinerl track`: what a run has recorded, to TensorBoard; for runs that are over, or that had no tracker."""

from __future__ import annotations

import hashlib
from contextlib import closing
from functools import partial
from pathlib import Path

from pipelinerl.errors import UserError
from pipelinerl.observability.trackers.feed import TrackerFeed
from pipelinerl.observability.trackers.tracker import missing_package
from pipelinerl.roles.tracker_role import open_tensorboard


def track_run(run_dir: Path, directory: Path) -> str:
    """Take what is new since the last time to event files in `directory`; returns a sentence on it.

    Raises:
        UserError: there is no run, tensorboardX is missing, or something cannot be read or written.
    """
    if not (run_dir / "events.jsonl").is_file():
        raise UserError(f"{run_dir} is no run: it has no events.jsonl")
    if sentence := missing_package("tensorboard"):
        raise UserError(sentence)
    pieces, place = 0, directory.resolve()
    name = f"tensorboard-{hashlib.sha256(str(place).encode()).hexdigest()[:12]}"
    try:
        with closing(TrackerFeed(run_dir, name, partial(open_tensorboard, place))) as feed:
            while feed.advance():
                pieces += 1
            over = feed.is_over
    except BlockingIOError as error:
        raise UserError(f"{error}; one at a time") from None
    except ValueError as error:
        raise UserError(str(error)) from None
    except OSError as error:
        raise UserError(f"{directory} cannot be written: {error.strerror or error}") from None
    new = "" if pieces else "nothing new for "
    going = "" if over else "; the run is not over: say this again for what comes"
    return f"{new}{directory}; look at it with: tensorboard --logdir {directory}{going}"
