"""The controller's process: streams, problem sources, HTTP routes, event log."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path

from pipelinerl.config import RunConfig
from pipelinerl.controller.api import create_api
from pipelinerl.controller.controller import Controller
from pipelinerl.controller.evaluation import EvaluationPlan
from pipelinerl.controller.knobs import Knobs
from pipelinerl.controller.service import ControllerService, Start
from pipelinerl.controller.settings import ControllerSettings
from pipelinerl.controller.state import RunState
from pipelinerl.data.mixture import Mixture
from pipelinerl.engines.http_client import EngineClient
from pipelinerl.errors import UserError
from pipelinerl.http_service import listen, serve_until
from pipelinerl.observability.events import EventLog, read_events
from pipelinerl.roles.parts import checkpoints_of, knobs_of
from pipelinerl.roles.process import Identity
from pipelinerl.roles.sources import held_out_problems, training_problems
from pipelinerl.training.checkpoint import TrainingState
from pipelinerl.types import Sampling


def build_controller(config: RunConfig, restored: TrainingState | None) -> Controller:
    """The controller of a run, continuing from a checkpoint when there is one."""
    training: Mixture = training_problems(config)
    held_out: Mixture = held_out_problems(config)
    knobs = knobs_of(config)
    state = RunState(knobs=knobs, first_domain_weights=knobs.domain_weights)
    if restored is not None:
        state.resume(restored.controller, step=restored.model_version)
    return Controller(settings_of(config), state, training_problem=training.problem, held_out_problem=held_out.problem)


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
    sampling = config.sampling
    return ControllerSettings(
        seed=config.run.seed,
        steps=config.run.steps,
        until_accuracy=config.run.until_accuracy,
        max_groups=config.streams.max_groups,
        sampling=Sampling(
            num_samples=sampling.group_size,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=sampling.stop,
        ),
        evaluation=EvaluationPlan(
            problems=config.evaluation.problems,
            max_tokens=config.evaluation_max_tokens,
            samples=config.evaluation.samples,
            temperature=config.evaluation.temperature,
            pass_at=config.evaluation.pass_at,
            pin=config.evaluation.pin,
            hold_s=config.evaluation.hold_s,
        ),
        stall_s=config.run.stall_s,
        checkpoint_interval_steps=config.checkpoint.interval_steps,
        engines_expected=config.engine.count,
    )


async def run(identity: Identity, *, start: Start) -> None:
    """Serve until the run is over or the process is told to stop.

    Afresh, it goes on from the run's newest checkpoint; from its journal, where a controller that died left off.
    """
    checkpoints = checkpoints_of(identity.config, identity.run_dir)
    latest = checkpoints.latest()
    log = identity.run_dir / "events.jsonl"
    age_s = _age(log)
    with listen(identity.host, identity.port) as listener, EventLog(log) as events:
        stream = await identity.stream()
        client = EngineClient(token=identity.token)
        controller = build_controller(identity.config, latest[1] if latest else None)
        for sentence in overruled(identity.config, controller.state.knobs) if start is Start.AFRESH else ():
            logging.getLogger("pipelinerl").warning(sentence)
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
        )
        endpoint = _advertise(identity, listener.getsockname())
        running = asyncio.create_task(service.run())
        try:
            await serve_until(create_api(service, token=identity.token), listener, over=running)
            if running.done():
                running.result()  # raises what stopped it, if it was not the end of the run
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            endpoint.unlink(missing_ok=True)
            await client.close()
            await stream.close()


def _age(log: Path) -> float:
    """Seconds that the run has been going, by its event log; 0 for a new one.

    Raises:
        UserError: the log is damaged.
    """
    try:
        return max((event.get("elapsed_s", 0.0) for event in read_events(log)), default=0.0)
    except FileNotFoundError:
        return 0.0
    except ValueError as error:
        raise UserError(f"{error}; remove that line to go on") from None


def _advertise(identity: Identity, address: tuple[str, int]) -> Path:
    """Leave address and token in the run's directory, for its owner's commands alone."""
    path = identity.run_dir / "controller.json"
    path.unlink(missing_ok=True)
    record = {"url": f"http://{address[0]}:{address[1]}", "token": identity.token}
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(record, file)
    return path
