"""The controller's process: streams, problem sources, HTTP routes, event log."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pydantic import SecretStr

from pipelinerl.config.evaluation import HeldOutSet
from pipelinerl.config.recipe import RunConfig, check_layout, save, write_layout
from pipelinerl.config.sections import shared_values
from pipelinerl.controller.decisions.controller import Controller
from pipelinerl.controller.service.api import create_api
from pipelinerl.controller.service.journal import Journal
from pipelinerl.controller.service.service import ControllerService, Start
from pipelinerl.controller.state.cooldown import CooldownRule
from pipelinerl.controller.state.evaluation import EvaluationPlan, EvaluationSet
from pipelinerl.controller.state.knobs import Knobs
from pipelinerl.controller.state.run_state import RunState
from pipelinerl.controller.state.settings import ControllerSettings
from pipelinerl.data.mixture import Mixture
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.enums import NoSignal
from pipelinerl.errors import UserError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.observability.restarts import read_restarts
from pipelinerl.observability.samples.reading import FOLDER
from pipelinerl.observability.samples.sample_log import SampleLog
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.resumption import claim
from pipelinerl.roles.wiring import checkpoints_of, elastic_of, held_out_problems, knobs_of, training_problems
from pipelinerl.streams.stream import Stream, parse_id
from pipelinerl.system.files import write_private
from pipelinerl.system.http_service import listen, serve_until, url_of
from pipelinerl.training.checkpoints.manifest import TrainingState

#: How long it is looked whether a controller lives: at least one heartbeat of an actor that works for it.
_LOOK_S: Final = 5.0
#: Hosts of a stream server that others would look for on their own machine; None is a socket in the file system.
_HERE: Final = (None, "127.0.0.1", "::1", "localhost")

log = logging.getLogger("pipelinerl")


def build_controller(config: RunConfig, restored: TrainingState | None) -> Controller:
    """The controller of a run, continuing from a checkpoint when there is one."""
    training: Mixture = training_problems(config)
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
    """A sentence for each knob that was changed while the run was live and differs from its recipe."""
    recipe = knobs_of(config).to_json()
    return [
        f"{name} is {value}, as it was set while the run was live; the recipe says {recipe[name]}: "
        "`pipelinerl knobs set` changes it"
        for name, value in knobs.to_json().items()
        if value != recipe[name]
    ]


def settings_of(config: RunConfig) -> ControllerSettings:
    """The controller's part of the recipe."""
    no_signal = config.training.no_signal or no_signal_of(config.objective)
    filters = no_signal is NoSignal.FILTER or config.curation.filter is not None
    return ControllerSettings(
        **shared_values(config.run, ControllerSettings),
        max_groups=config.streams.max_groups,
        sampling=config.sampling.of_an_order,
        by_domain={domain.name: domain.sampling for domain in config.domains},
        evaluation=plan_of(config, config.evaluation_sets),
        scope=config.staleness.scope,
        overdue=config.staleness.overdue,
        no_signal=no_signal,
        oversample=config.curation.oversample if filters else 1.0,
        cooldown={
            domain.name: CooldownRule(**(domain.cooldown or config.curation.cooldown).model_dump())
            for domain in config.domains
        },
        elastic=elastic_of(config),
        checkpoint_interval_steps=config.checkpoint.interval_steps,
        engines_expected=config.engine.count,
        save_s=config.launch.save_s,
    )


def plan_of(config: RunConfig, sets: Iterable[HeldOutSet]) -> EvaluationPlan:
    """What an evaluation of these sets asks, and how."""
    return EvaluationPlan(
        sets=tuple(
            EvaluationSet(
                name=each.name,
                place=each.place,
                problems=each.problems,
                max_tokens=each.max_tokens or 0,
                samples=each.samples,
                temperature=each.temperature,
                pass_at=each.pass_at,
                interval_steps=each.interval_steps or 0,
            )
            for each in sets
            if each.problems
        ),
        pin=config.evaluation.pin,
        hold_s=config.evaluation.hold_s,
    )


async def run(identity: Identity, *, start: Start) -> None:
    """Serve until the run is over or the process is told to stop.

    Afresh, it goes on from the run's newest checkpoint; from its journal, where a controller that died left off.

    Raises:
        UserError: it would begin a run where another of its name is live, or has its copies; or the directory's run is
            of another layout.
    """
    check_layout(identity.run_dir)
    checkpoints = checkpoints_of(identity.config, identity.run_dir)
    latest = checkpoints.latest()
    history = identity.run_dir / "events.jsonl"
    age_s = _age(history)
    with listen(identity.host, identity.port) as listener, EventLog(history) as events:
        stream = await identity.stream()
        client = EngineClient(token=identity.token)
        samples = _samples_of(identity)
        try:
            begins = start is Start.AFRESH and latest is None and not age_s
            if begins:
                await _refuse_namesake(identity, stream)
                await _drop_rollouts(stream)
            _leave_recipe(identity, begins=begins)
            controller = build_controller(identity.config, latest[1] if latest else None)
            for sentence in overruled(identity.config, controller.state.knobs) if start is Start.AFRESH else ():
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
                start=start,
                samples=samples,
                restarts=partial(read_restarts, identity.run_dir),
            )
            freeze_gc()
            await _serve(identity, service, listener)
        finally:
            if samples is not None:
                samples.close()
            await client.close()
            await stream.close()


def _samples_of(identity: Identity) -> SampleLog | None:
    """Where evaluations' answers are kept; None where the recipe wants no samples."""
    section = identity.config.samples
    if section.log == "off":
        return None
    return SampleLog(identity.run_dir / FOLDER, "evaluation", max_bytes=section.max_bytes // 2)


async def _serve(identity: Identity, service: ControllerService, listener: socket.socket) -> None:
    endpoint = _advertise(identity, listener.getsockname())
    running = asyncio.create_task(service.run())
    try:
        await serve_until(create_api(service, token=identity.token), listener, over=running)
        if running.done():
            running.result()  # raises what stopped it, if it was not the end of the run
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        endpoint.withdraw()


def _age(history: Path) -> float:
    """Seconds that the run has been going, by its event log; 0 for a new one.

    Raises:
        UserError: the log is damaged.
    """
    try:
        return max((event.get("elapsed_s", 0.0) for event in read_events(history)), default=0.0)
    except FileNotFoundError:
        return 0.0
    except ValueError as error:
        raise UserError(f"{error}; remove that line to go on") from None


async def _refuse_namesake(identity: Identity, stream: Stream) -> None:
    """A run that begins must not take the streams of one that is live.

    Raises:
        UserError: that is what it would do.
    """
    if await Journal.is_being_written(stream, for_s=_LOOK_S):
        name = identity.config.run.name
        raise UserError(
            f"a run named {name!r} is live at this stream server, and {identity.run_dir} is not its directory: give "
            "this one another run.name; a controller that is to take over says --continue"
        )


async def _drop_rollouts(stream: Stream) -> None:
    """What a dead run of this name has left there: a trainer that begins would take it for its own."""
    for partition in await stream.streams(ROLLOUTS):
        time_ms, number = parse_id(await stream.last_id(partition))
        await stream.trim(partition, before=f"{time_ms}-{number + 1}")


def _leave_recipe(identity: Identity, *, begins: bool) -> None:
    """Leave what it takes to go on with the run where no launcher has: the recipe, and which server has the streams.

    One on this machine is left out: who goes on may be on another, and starts its own.

    Raises:
        UserError: the run begins, and its location holds another's copies, which its own would push out.
    """
    path, config = identity.run_dir / "recipe.toml", identity.config
    if path.exists():
        return
    if urlsplit(identity.redis_url).hostname not in _HERE:
        streams = config.streams.model_copy(update={"redis_url": SecretStr(identity.redis_url)})
        config = config.model_copy(update={"streams": streams})
    url, taken = config.checkpoint.url_of(config.run.name), False
    try:
        taken = not claim(config)
    except (OSError, UserError) as error:  # it may be the trainer's alone to write to
        log.warning("%s cannot be resumed from yet, the recipe is not there: %s", url, error)
    if taken and begins:
        raise UserError(
            f"{url} holds the copies of a run, and {identity.run_dir} is not its directory: give this one another "
            f"run.name, or go on with that one: pipelinerl run --resume {url}"
        )
    write_layout(identity.run_dir)
    save(config, path)


@dataclass(frozen=True)
class _Endpoint:
    """What was left in the run's directory, and where."""

    path: Path
    text: str

    def withdraw(self) -> None:
        """Take it away, unless a controller that has taken over has left its own."""
        with suppress(FileNotFoundError):
            if self.path.read_text() == self.text:
                self.path.unlink()


def _advertise(identity: Identity, bound: tuple[Any, ...]) -> _Endpoint:
    """Leave address and token in the run's directory, for its owner's commands alone; `bound` is (host, port, …).

    Who reads it is on this machine: where the controller listens everywhere, loopback reaches it.
    """
    host, port = bound[:2]
    if ip_address(host).is_unspecified:
        host = "::1" if ":" in host else "127.0.0.1"
    made = _Endpoint(
        identity.run_dir / "controller.json", json.dumps({"url": url_of(host, port), "token": identity.token})
    )
    write_private(made.path, made.text)
    return made
