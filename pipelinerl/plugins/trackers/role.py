"""The tracker's process, which forwards a run's metrics to the recipe's trackers, and the command `pipelinerl track`.

    thread (one per tracker)  waits for              unblocked by
    feed                      new events             the clock, twice a second
                              a tracker that failed  its retry, after 1, 2, 4, … 30 s

No other process waits for this one, and this one sends no requests to others. A tracker that fails (full disk,
unreachable server, a bug in its package) is reopened and continues where it stopped. The launcher stops this process
after the controller; before the process ends, it forwards all events.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer

from pipelinerl import registry
from pipelinerl.config.recipe import RunConfig, to_table
from pipelinerl.errors import UserError
from pipelinerl.observability.logs import table_without_secrets
from pipelinerl.plugins.trackers.tracker import OpenTracker, TensorBoardTracker, TrackedRun, TrackerFeed
from pipelinerl.roles.process import Identity
from pipelinerl.roles.role import RunPath
from pipelinerl.system.background import in_background, settled

log = logging.getLogger("pipelinerl")

_POLL_S: Final = 0.5
_FIRST_RETRY_S: Final = 1.0
_RETRY_S: Final = 30.0
#: Deadline in seconds for forwarding the last events after a stop, including the uploads of W&B and trackio. The
#: launcher kills the process a little later (`launch.plan`).
_END_S: Final = 60.0


async def run(identity: Identity) -> None:
    """Feed the trackers until the process is stopped; raise `UserError` without trackers or if a package is missing."""
    wanted = trackers_of(identity.config, identity.run_dir)
    if not wanted:
        raise UserError("the recipe names no tracker: add trackers.tensorboard = true, or another of [trackers]")
    stop = threading.Event()
    feeds = [
        in_background(name, partial(feed_until, identity.run_dir, name, open_tracker, stop))
        for name, open_tracker in wanted.items()
    ]
    try:
        await asyncio.gather(*(asyncio.wrap_future(feed) for feed in feeds))
    finally:
        stop.set()
        for feed in feeds:
            await settled(feed, timeout_s=_END_S)


def feed_until(
    run_dir: Path,
    name: str,
    open_tracker: OpenTracker,
    stop: threading.Event,
    *,
    first_retry_s: float = _FIRST_RETRY_S,
) -> None:
    """Feed one tracker until `stop` is set and all events are forwarded; retry after any error."""
    pause_s = first_retry_s
    while True:
        try:
            with closing(TrackerFeed(run_dir, name, open_tracker)) as feed:
                while True:
                    stopping = stop.is_set()  # read `stop` first: all events before the stop are then sent
                    while feed.advance():
                        pause_s = first_retry_s
                    if stopping:
                        return
                    stop.wait(_POLL_S)
        except Exception as error:  # third-party packages may raise any exception
            log.warning("%s: %s: %s; the run continues, retrying in %g s", name, type(error).__name__, error, pause_s)
        if stop.wait(pause_s):
            return
        pause_s = min(2 * pause_s, _RETRY_S)


def trackers_of(config: RunConfig, run_dir: Path) -> dict[str, OpenTracker]:
    """Return, for each tracker of the recipe, a function that opens it; raise `UserError` if a package is missing."""
    section = config.trackers
    recipe = table_without_secrets(to_table(config))  # trackers upload the recipe, and its URLs may hold passwords
    tracked = TrackedRun(name=config.run.name, directory=run_dir, recipe=recipe)
    return {
        name: partial(
            registry.load("trackers", registry.TRACKERS, name),
            getattr(section, name) if registry.TRACKERS[name].section else None,
            tracked,
        )
        for name in section.chosen
    }


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
