"""An engine's process: the registered engine behind the HTTP routes of the contract, registered with the controller."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import httpx

from inference_contract.engine import Engine
from inference_contract.errors import EngineStopped
from inference_contract.schemas import EngineState
from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.controller.client import AsyncControllerClient
from pipelinerl.controller.routes import OFFER_S
from pipelinerl.engines.http.server import create_app
from pipelinerl.engines.weights.announced_updates import follow_announcements
from pipelinerl.errors import AddressError, EngineUnreachable, RecipeError, UserError
from pipelinerl.roles.engine_rules import options_of
from pipelinerl.roles.process import Identity, end, freeze_gc
from pipelinerl.system.cores import ComputeCores
from pipelinerl.system.http_client import async_session
from pipelinerl.system.http_service import OPEN_PATH, listen, offered_url, serve_until

log = logging.getLogger("pipelinerl")

#: Seconds between checks that the engine still runs.
WATCH_S = 0.5
#: Seconds between two lines about an engine that is still loading its model.
_LOADING_S = 15.0
#: Seconds between two attempts to connect to the streams.
_AGAIN_S = 10.0


def build_engine(identity: Identity) -> Engine:
    """Make the engine that the recipe names. Raises `RecipeError` if its type, server or transport is missing."""
    config = identity.config
    server = None
    if config.engine.type in registry.ENGINES.having("drives_server"):  # engine-2 has the third of `engine.servers`
        servers, number = config.engine.servers, identity.name.rpartition("-")[2]
        index = int(number) if number.isdecimal() else 0
        if index >= len(servers):
            raise RecipeError(
                f"engine.servers must name a server for {identity.name}, number {index}, got {len(servers)} of them; "
                "each engine stands for a server of its own"
            )
        server = servers[index]
    own = registry.TRANSPORTS[config.weights.transport]
    # Any run may begin to fetch weights from servers, if the plug-in is there.
    fetching = own if own.fetch else next((each for _, each in registry.TRANSPORTS.loadable() if each.fetch), None)
    pull = None if fetching is None else imported(fetching.fetch)(token=identity.token)
    build = registry.load("engine.type", registry.ENGINES, config.engine.type)
    engine: Engine = build(replace(options_of(config), pull=pull, server=server))
    if not own.fetch:
        # Import torch in advance: at the first update, all engines of the process group would wait for it.
        import_module("pipelinerl.weights.broadcast.collective")
    return engine


def engine_outside_run(config: RunConfig) -> Engine:
    """Make the recipe's engine for use without a run: without streams, controller and token."""
    return build_engine(Identity(config=config, run_dir=config.run_directory, name="engine-0"))


async def run(identity: Identity) -> None:
    """Serve until stopped; raise `EngineUnreachable` if the engine stops, so that the launcher restarts it."""
    with listen(identity.host, identity.port) as listener:
        url = offered_url(listener.getsockname(), identity.controller_url) if identity.controller_url else ""
        engine = build_engine(identity)
        app = create_app(engine, token=identity.token)
        watches = [asyncio.create_task(_stopped(engine))]
        if url:  # these two only end with an error, which ends the process
            watches += [asyncio.create_task(each(identity, engine, url)) for each in (_offer, _follow)]
        over = asyncio.ensure_future(asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED))
        try:
            await serve_until(app, listener, over=over)
            if watches[0].done():
                raise EngineUnreachable("the engine stopped by itself; the log above says why")
        finally:
            await end(*watches, over)


async def _stopped(engine: Engine) -> None:
    """Wait for the engine's start, exempt all objects loaded by then from garbage collection, and wait for its stop."""
    began = told_at = time.monotonic()
    while not _started(engine):
        if time.monotonic() - told_at >= _LOADING_S:
            told_at = time.monotonic()
            log.info("the engine is loading its model, for %.0f s so far", told_at - began)
        await asyncio.sleep(WATCH_S)
    log.info("the engine has loaded its model")
    freeze_gc()
    while engine.health().state is not EngineState.STOPPED:
        await asyncio.sleep(WATCH_S)


def _started(engine: Engine) -> bool:
    try:
        engine.model_card()
    except EngineStopped:
        return False
    return True


async def _follow(identity: Identity, engine: Engine, url: str) -> None:
    """Apply weight updates that are announced on a stream, unless the run updates engines by requests."""
    announced = identity.config.weights.announced_to(identity.config.engine.count)
    while not (announced and _started(engine)):
        await asyncio.sleep(WATCH_S)
    while True:
        try:
            stream = await identity.stream()
            try:
                await follow_announcements(engine, stream, url=url)
            finally:
                await stream.close()
        except AddressError as error:
            log.warning("this engine receives no announcements of weights and is updated by requests: %s", error)
        await asyncio.sleep(_AGAIN_S)


async def _offer(identity: Identity, engine: Any, url: str) -> None:
    config, incarnation = identity.config, f"{os.getpid()}-{time.time_ns()}"
    set_threads = registry.ENGINES[config.engine.type].use_threads if config.may_take_turns else ""
    cores, shared = ComputeCores(set_threads, config.launch.threads), None
    reachable, again_s = True, OFFER_S / 4
    async with (
        AsyncControllerClient(identity.controller_url, identity.token) as controller,
        async_session(url, timeout_s=5.0) as itself,
    ):
        while True:
            answers = False
            try:
                with suppress(httpx.HTTPError):  # while it loads its model, which `_stopped` logs, it does not answer
                    answers = (await itself.get(OPEN_PATH)).status_code == httpx.codes.OK
                if answers:
                    taken = await controller.register_engine(
                        url, incarnation=incarnation, name=identity.name, type=config.engine.type
                    )
                    again_s, reachable = taken.again_s, True
                    if taken.cores != shared and set_threads:
                        shared = taken.cores
                        engine.between_steps(partial(cores.use, shared))
            except UserError as error:
                if reachable:
                    log.warning("the controller at %s did not take this engine: %s", controller.url, error)
                reachable = False
            await asyncio.sleep(again_s if reachable else OFFER_S / 4)
