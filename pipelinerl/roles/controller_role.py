"""The controller's process: streams, mixtures of problems, HTTP routes and event log."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.config.recipe import RunConfig, check_layout, save, write_layout
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.decisions.watch import ServerWatch
from pipelinerl.controller.service.api import create_api
from pipelinerl.controller.service.journal import Journal
from pipelinerl.controller.service.service import ControllerService
from pipelinerl.controller.state.evaluation import EvaluationPlan
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.run_state import ControllerSettings, RunState
from pipelinerl.data.mixture import Mixture
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.enums import NoSignal
from pipelinerl.errors import UserError
from pipelinerl.messages import REPORTS, ROLLOUTS
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.observability.status import read_restarts
from pipelinerl.roles.engine_rules import elastic_of
from pipelinerl.roles.problems import held_out_problems, training_problems
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.resumed_run import claim
from pipelinerl.roles.wiring import checkpoints_of, knobs_of, objective_of
from pipelinerl.streams.stream import Stream, parse_id
from pipelinerl.system.files import write_private
from pipelinerl.system.http_service import listen, serve_until, url_of
from pipelinerl.training.checkpoints.manifest import TrainingState

#: Seconds to look for signs of another live controller or of its actors: longer than the actors' heartbeat interval.
_LOOK_S: Final = 5.0
#: Seconds that a controller which has been replaced gets to close the event log: it notices at its next poll.
_HAND_OVER_S: Final = 15.0
_END_OR_TAKE_OVER: Final = (
    "take over with `pipelinerl controller {run}/recipe.toml --continue`, or end all processes of the run first"
)
#: Hosts in a stream server's URL that mean this machine; None stands for a Unix socket.
_LOCAL_HOSTS: Final = (None, "127.0.0.1", "::1", "localhost")

log = logging.getLogger("pipelinerl")


def build_controller(config: RunConfig, restored: TrainingState | None) -> Controller:
    """Return the controller of a run, which continues from a checkpoint if there is one."""
    training: Mixture = training_problems(config)
    for sentence in training.row_counts():
        log.info("%s", sentence)
    held_out = held_out_problems(config)
    knobs = knobs_of(config)
    state = RunState(knobs=knobs, first_domain_weights=knobs.domain_weights)
    if restored is not None:
        state.resume(restored.controller, step=restored.model_version)
        state.evaluations.follow({each.name: each.place for each in config.evaluation_sets})
    return Controller(
        settings_of(config),
        state,
        training_problem=training.problem,
        held_out_problem=lambda name, index: held_out[name].problem(index),
    )


def overruled(config: RunConfig, knobs: Knobs) -> list[str]:
    """Return a warning for each knob that was changed in the live run and now differs from the recipe's value."""
    recipe = knobs_of(config).to_json()
    return [
        f"{name} is {value}, set while the run was live; the recipe has {recipe[name]}; change it with "
        "`pipelinerl knobs set`"
        for name, value in knobs.to_json().items()
        if value != recipe[name]
    ]


def settings_of(config: RunConfig) -> ControllerSettings:
    """Return the settings in the recipe that the controller uses."""
    no_signal = config.training.no_signal or no_signal_of(config.objective)
    objective = objective_of(config)
    filters = no_signal is NoSignal.FILTER or config.curation.filter is not None
    return ControllerSettings(
        run=config.run,
        max_groups=config.streams.max_groups,
        sampling=config.sampling.of_an_order,
        by_domain={domain.name: domain.sampling for domain in config.domains},
        evaluation=plan_of(config, config.evaluation_sets),
        scope=config.staleness.scope,
        overdue=config.staleness.overdue,
        no_signal=no_signal,
        oversample=config.curation.oversample if filters else 1.0,
        lag_loss=objective.lag_loss(config.training.old_logprobs),
        cooldown={domain.name: domain.cooldown or config.curation.cooldown for domain in config.domains},
        elastic=elastic_of(config),
        checkpoint_interval_steps=config.checkpoint.interval_steps,
        engines_expected=config.engine.count,
        save_s=config.launch.save_s,
    )


def plan_of(config: RunConfig, sets: Iterable[EvaluationSet]) -> EvaluationPlan:
    """Return the plan of an evaluation on these sets of problems."""
    section = config.evaluation
    return EvaluationPlan(sets=tuple(each for each in sets if each.problems), pin=section.pin, hold_s=section.hold_s)


async def run(identity: Identity, *, from_journal: bool = False) -> None:
    """Serve until the run is over or the process is stopped.

    The controller continues from the run's newest checkpoint or, with `from_journal`, from the journal (durable state)
    of a controller that died.

    Raises:
        UserError: another controller or other processes of the run are live, another run of this name is live or has
            checkpoints at the recipe's location, or the run directory has another layout version.
    """
    check_layout(identity.run_dir)
    checkpoints = checkpoints_of(identity.config, identity.run_dir)
    latest = checkpoints.latest()
    history = identity.run_dir / "events.jsonl"
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listen(identity.host, identity.port))
        stream = await identity.stream()
        stack.push_async_callback(stream.close)
        if from_journal:
            await Journal.take_over(stream)
        elif history.exists():
            await _refuse_live_run(identity, stream)
        events = stack.enter_context(await _event_log(identity, history, _HAND_OVER_S if from_journal else 0.0))
        age_s = _age(history)
        client = EngineClient(token=identity.token)
        samples = identity.sample_log("evaluation")
        try:
            begins = not from_journal and latest is None and not age_s
            if begins:
                await _refuse_namesake(identity, stream)
                await _drop_rollouts(stream)
            _write_recipe(identity, begins=begins)
            controller = build_controller(identity.config, latest[1] if latest else None)
            for sentence in overruled(identity.config, controller.state.knobs) if not from_journal else ():
                log.warning(sentence)
            controller.state.launch = identity.launch
            controller.state.epoch = max(controller.state.epoch, checkpoints.claimed_epoch)
            service = ControllerService(
                controller,
                name=identity.config.run.name,
                stream=stream,
                probe=client,
                events=events,
                elapsed_s=age_s,
                from_journal=from_journal,
                samples=samples,
                restarts=partial(read_restarts, identity.run_dir),
                parameter_servers=ServerWatch(
                    identity.config.parameter_server.urls, shards=identity.config.parameter_server.shards
                ),
            )
            freeze_gc()
            await _serve(identity, service, listener)
        finally:
            if samples is not None:
                samples.close()
            await client.close()


async def _serve(identity: Identity, service: ControllerService, listener: socket.socket) -> None:
    with _advertised(identity, listener.getsockname()):
        running = asyncio.create_task(service.run())
        try:
            await serve_until(create_api(service, token=identity.token), listener, over=running)
            if running.done():
                running.result()  # raises the error that stopped the service, if there was one
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def _age(history: Path) -> float:
    """Return the age at which a resumed run's clock continues: `elapsed_s` of its newest event; 0 for a new run."""
    try:
        return max((event.get("elapsed_s", 0.0) for event in read_events(history)), default=0.0)
    except FileNotFoundError:
        return 0.0


async def _event_log(identity: Identity, history: Path, lock_s: float) -> EventLog:
    """Open the run's event log; wait for a controller that this one replaces to close it."""
    try:
        return await asyncio.to_thread(EventLog, history, lock_s=lock_s)
    except BlockingIOError as error:
        raise UserError(f"{error}; {_END_OR_TAKE_OVER.format(run=identity.run_dir)}") from None


async def _refuse_live_run(identity: Identity, stream: Stream) -> None:
    """Raise `UserError` if processes of this run are reporting: they obey only a controller that knows their state."""
    last = await stream.last_id(REPORTS)
    silent_s = time.time() - parse_id(last)[0] / 1000
    if 0 <= silent_s < _LOOK_S and await stream.read({REPORTS: last}, count=1, block_s=_LOOK_S - silent_s):
        raise UserError(
            f"the trainer and actors of {identity.run_dir} are live; {_END_OR_TAKE_OVER.format(run=identity.run_dir)}"
        )


async def _refuse_namesake(identity: Identity, stream: Stream) -> None:
    if await Journal.is_being_written(stream, for_s=_LOOK_S):
        name = identity.config.run.name
        raise UserError(
            f"a run named {name!r} is live at this stream server, and {identity.run_dir} is not its directory; "
            "choose another run.name, or take over with --continue"
        )


async def _drop_rollouts(stream: Stream) -> None:
    # A new trainer must not train on rollouts that a dead run of this name left in the streams.
    for partition in await stream.streams(ROLLOUTS):
        time_ms, number = parse_id(await stream.last_id(partition))
        await stream.trim(partition, before=f"{time_ms}-{number + 1}")


def _write_recipe(identity: Identity, *, begins: bool) -> None:
    """Write the resolved recipe to the run's directory, unless the launcher has written it already.

    If the run `begins` now and its checkpoint location holds another run of this name, `UserError` is raised instead.
    The recipe includes the address of the stream server, so that the run can be resumed. An address on this machine is
    left out, because a run that is resumed on another machine has its stream server on that machine.
    """
    path, config = identity.run_dir / "recipe.toml", identity.config
    if path.exists():
        return
    if urlsplit(identity.redis_url).hostname not in _LOCAL_HOSTS:
        config = config.changed("streams", redis_url=SecretStr(identity.redis_url))
    url, taken = config.checkpoint.url_of(config.run.name), False
    try:
        taken = not claim(config)
    except (OSError, UserError) as error:
        # Do not fail: the trainer's process may be the only one that can write to the location.
        log.warning("%s cannot be resumed from yet, because the recipe cannot be written there: %s", url, error)
    if taken and begins:
        raise UserError(
            f"{url} holds the copies of a run, and {identity.run_dir} is not its directory; choose another "
            f"run.name, or resume that run: pipelinerl run --resume {url}"
        )
    write_layout(identity.run_dir)
    save(config, path)


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
