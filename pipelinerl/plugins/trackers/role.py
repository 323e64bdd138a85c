"""The tracker's process: reads the run's event log and forwards its metrics to the recipe's experiment trackers.

    thread (one per tracker)  waits for              unblocked by
    feed                      new events             the clock, twice a second
                              a tracker that failed  its retry, after 1, 2, 4, … 30 s

No other process waits for this one, and this one sends no requests to others. A tracker that fails (full disk,
unreachable server, a bug in its package) is reopened and continues where it stopped. The launcher stops this process
after the controller; before the process ends, it forwards all events.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final

from pipelinerl import registry
from pipelinerl.config.recipe import RunConfig, to_table
from pipelinerl.errors import UserError
from pipelinerl.observability.logs import table_without_secrets
from pipelinerl.plugins.trackers.tracker import (
    OpenTracker,
    TrackedRun,
    TrackerFeed,
)
from pipelinerl.roles.process import Identity
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
