"""The controller's process: streams, mixtures of problems, HTTP routes and event log."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from typing import Any, Final

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import check_layout
from pipelinerl.controller.service.api import create_api
from pipelinerl.controller.service.journal import Journal
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.errors import UserError
from pipelinerl.messages import REPORTS, ROLLOUTS
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.observability.status import read_restarts
from pipelinerl.roles.new_controller import build_controller, overruled, shared_cores
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.resumed_run import write_recipe
from pipelinerl.roles.wiring import checkpoints_of
from pipelinerl.streams.stream import Stream, parse_id
from pipelinerl.system.files import write_private
from pipelinerl.system.http_service import listen, serve_until, url_of

#: Seconds to look for signs of another live controller or of its actors: longer than the actors' heartbeat interval.
_LOOK_S: Final = 5.0
#: Seconds that a controller which has been replaced gets to close the event log: it notices at its next poll.
_HAND_OVER_S: Final = 15.0

log = logging.getLogger("pipelinerl")


async def run(identity: Identity, *, from_journal: bool = False) -> None:
    """Serve until the run is over or the process is stopped.

    The controller continues from the run's newest checkpoint or, with `from_journal`, from the journal (durable state)
    of a controller that died.

    Raises:
        UserError: another controller or other processes of the run are live, another run of this name is live or has
            checkpoints at the recipe's location, or the run directory has another layout version.
    """
    config, run_dir = identity.config, identity.run_dir
    check_layout(run_dir)
    checkpoints = checkpoints_of(config, run_dir)
    latest, history = checkpoints.latest(), run_dir / "events.jsonl"
    command = f"pipelinerl controller {run_dir}/recipe.toml --continue"
    take_over = f"take over with `{command}`, or end all processes of the run first"
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(identity.host, identity.port))
        stream = await identity.stream()
        stack.push_async_callback(stream.close)
        if from_journal:
            await Journal.take_over(stream)
        elif history.exists() and await _is_reporting(stream):
            raise UserError(f"the trainer and actors of {run_dir} are live; {take_over}")
        try:
            lock_s = _HAND_OVER_S if from_journal else 0.0
            events = stack.enter_context(await asyncio.to_thread(EventLog, history, lock_s=lock_s))
        except BlockingIOError as error:
            raise UserError(f"{error}; {take_over}") from None
        # The clock of a resumed run continues.
        written = read_events(history) if history.exists() else ()
        age_s = max((event.get("elapsed_s", 0.0) for event in written), default=0.0)
        client = EngineClient(token=identity.token)
        stack.push_async_callback(client.close)
        samples = identity.sample_log("evaluation")
        if samples is not None:
            stack.callback(samples.close)
        begins = not from_journal and latest is None and not age_s
        if begins:
            if await Journal.is_being_written(stream, for_s=_LOOK_S):
                raise UserError(
                    f"a run named {config.run.name!r} is live at this stream server, and {run_dir} is not its "
                    "directory; choose another run.name, or take over with --continue"
                )
            # A new trainer must not train on rollouts that a dead run of this name left in the streams.
            for partition in await stream.streams(ROLLOUTS):
                time_ms, number = parse_id(await stream.last_id(partition))
                await stream.trim(partition, before=f"{time_ms}-{number + 1}")
        write_recipe(config, run_dir, identity.redis_url, begins=begins)
        cores = shared_cores(config, listener.getsockname()[0])
        controller = build_controller(config, latest[1] if latest else None, cores=cores)
        for sentence in overruled(config, controller.state.knobs) if not from_journal else ():
            log.warning(sentence)
        controller.state.launch = identity.launch
        controller.state.epoch = max(controller.state.epoch, checkpoints.claimed_epoch)
        watch = registry.TRANSPORTS[config.weights.transport].watch
        service = ControllerService(
            controller,
            name=config.run.name,
            stream=stream,
            probe=client,
            events=events,
            elapsed_s=age_s,
            from_journal=from_journal,
            samples=samples,
            restarts=partial(read_restarts, run_dir),
            transport=imported(watch)(config, client) if watch else None,
        )
        freeze_gc()
        stack.enter_context(_advertised(identity, listener.getsockname()))
        running = asyncio.create_task(service.run())
        try:
            await serve_until(create_api(service, token=identity.token), listener, over=running)
            if running.done():
                running.result()  # raises the error that stopped the service, if there was one
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def _is_reporting(stream: Stream) -> bool:
    """Look for reports of processes of this run, which obey only a controller that knows their state."""
    last = await stream.last_id(REPORTS)
    silent_s = time.time() - parse_id(last)[0] / 1000
    return 0 <= silent_s < _LOOK_S and bool(await stream.read({REPORTS: last}, count=1, block_s=_LOOK_S - silent_s))


@contextmanager
def _advertised(identity: Identity, bound: tuple[Any, ...]) -> Iterator[None]:
    """During the block, keep the controller's address in a file of the run's directory, for local commands."""
    # Clients cannot connect to 0.0.0.0. The commands that read this file run on this machine, so write loopback there.
    host, port = bound[:2]
    if ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    path, text = identity.run_dir / "controller.json", json.dumps({"url": url_of(host, port), "token": identity.token})
    write_private(path, text)
    try:
        yield
    finally:
        with suppress(FileNotFoundError):
            if path.read_text() == text:  # otherwise another controller has taken over
                path.unlink()
