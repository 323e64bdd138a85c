"""The trainer's process: builds the workers (models), the training loop, the weight publisher and the checkpoints."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial
from typing import final

from inference_contract.schemas import ChatMessage
from inference_contract.weights import Transport
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import shared_values
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.enums import Overdue, RoutingReplay
from pipelinerl.errors import RecipeError
from pipelinerl.models.checkpoint import vocab_size
from pipelinerl.models.model_shape import mixture_of
from pipelinerl.models.tokenizer import decoder_of
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.plugins.parameter_server.publisher import PullPublisher
from pipelinerl.plugins.parameter_server.upload import Uploader
from pipelinerl.roles.dtypes import dtypes_of
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.wiring import (
    checkpoints_of,
    losses_of,
    mini_batching_of,
    objective_of,
    routing_of,
    training_problems,
)
from pipelinerl.roles.workers import close_workers, started
from pipelinerl.streams.stream import Stream
from pipelinerl.trainers.ranks.rank0 import leave_undone
from pipelinerl.training.canary_check import ROUTED_APART, TOLERANCES, Canary, check_canary
from pipelinerl.training.loop import LoopSettings, TrainingLoop
from pipelinerl.training.publishing import StreamAnnouncer
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step_watch import StepWatch, TrainingSamples
from pipelinerl.weights.broadcast.collective import offers
from pipelinerl.weights.broadcast.publisher import BroadcastPublisher
from pipelinerl.weights.engine_control import EngineControl
from pipelinerl.weights.grace import Grace
from pipelinerl.weights.publisher import Publisher

log = logging.getLogger("pipelinerl")


async def run(identity: Identity) -> None:
    """Train until the controller stops the run; after SIGTERM, save the state for a restart here or elsewhere."""
    config = identity.config
    process_log = identity.log()
    objective = objective_of(config)
    checkpoints = checkpoints_of(config, identity.run_dir)
    latest = checkpoints.latest()
    version = latest[1].model_version if latest else 0
    step = started(config, objective, checkpoint=latest[0] if latest else None, version=version)
    checkpoints.prepare(step.passes.policy.weight_layout())
    stream = await identity.stream()
    client = EngineClient(token=identity.token)
    samples, grace = samples_of(identity), Grace()
    loop = TrainingLoop(
        loop_settings(config),
        step=step,
        objective=objective,
        stream=stream,
        publisher=publisher_of(identity, client, stream, grace),
        check_canary=partial(check_canary, canary_of(config), client, grace),
        checkpoints=checkpoints,
        restored=latest[1] if latest else None,
        at=lambda version: process_log.at(step=version, model_version=version),
        watch=StepWatch(samples),
    )
    freeze_gc()
    notice = SigtermHandler(loop, save_s=config.launch.save_s)
    try:
        await loop.run()
        if notice.was_given:
            raise asyncio.CancelledError  # a normal return would mean that the work is done
    except BaseException:
        leave_undone()
        raise
    finally:
        await loop.close()
        if samples is not None:
            samples.log.close()
        await client.close()
        await stream.close()
        close_workers(step)


@final
class SigtermHandler:
    """Gives the trainer `save_s` after a first SIGTERM to save its state; a second SIGTERM cancels the trainer."""

    def __init__(self, training: TrainingLoop, *, save_s: float) -> None:
        self.was_given = False
        self._training = training
        self._save_s = save_s
        self._task = asyncio.current_task()
        self._events = asyncio.get_running_loop()
        self._events.add_signal_handler(signal.SIGTERM, self._give)

    def _give(self) -> None:
        assert self._task is not None
        if self.was_given:
            self._task.cancel()
            return
        log.info("stopping: saving the state first, within %g s", self._save_s)
        self.was_given = True
        self._training.leave()
        self._events.call_later(self._save_s, self._task.cancel)


def publisher_of(identity: Identity, control: EngineControl, stream: Stream, grace: Grace) -> Publisher:
    """Return the publisher for the recipe's transport; `stream` announces versions to engines that pull them.

    Raises:
        RecipeError: weights are pulled without a parameter server, or broadcast by a backend that torch lacks.
    """
    weights = identity.config.weights
    if weights.transport is Transport.BROADCAST:
        if not offers(weights.backend):
            raise RecipeError(f"weights.backend is {weights.backend}, which torch cannot use here; use gloo")
        return BroadcastPublisher(control, host=weights.host, backend=weights.backend, grace=grace)
    servers = identity.config.parameter_server
    if not servers.urls:
        raise RecipeError(
            "weights.transport is pull, and no parameter server is named; name them with --set "
            "'parameter_server.urls=[\"http://host:port\"]', as the launcher does"
        )
    announcer = StreamAnnouncer(stream) if weights.announced_to(identity.config.engine.count) else None
    uploader = Uploader(servers.urls, shards=servers.shards, token=identity.token)
    return PullPublisher(control, uploader, announcer=announcer, grace=grace)


def canary_of(config: RunConfig) -> Canary:
    """Return the canary: the first training problem, as a prompt whose log-probs show if an engine's weights are right.

    The tolerated difference follows from the least precise dtype that weights pass through from trainer to engine.
    """
    problem = training_problems(config).problem(0)
    replay, coarsest = config.trainer.routing_replay, dtypes_of(config).coarsest(config)
    routed_apart = replay is RoutingReplay.OFF and mixture_of(config.model.resolved) is not None
    return Canary(
        messages=tuple(ChatMessage.model_construct(role=m.role, content=m.content) for m in problem.messages),
        context_length=config.engine.context_length,
        tolerance=ROUTED_APART if routed_apart and coarsest == "float32" else TOLERANCES[coarsest],
        routing_replay=replay,
    )


def samples_of(identity: Identity) -> TrainingSamples | None:
    """Return the recorder of samples from training steps; None if the recipe keeps no samples."""
    config, log = identity.config, identity.sample_log("training")
    if log is None:
        return None
    return TrainingSamples(
        log=log,
        decode=decoder_of(config.model.resolved),
        seed=config.run.seed,
        groups_per_step=config.samples.groups_per_step,
    )


def loop_settings(config: RunConfig) -> LoopSettings:
    """Return the settings in the recipe that the training loop uses."""
    return LoopSettings(
        **shared_values(config.training, LoopSettings)
        | {"no_signal": config.training.no_signal or no_signal_of(config.objective)},
        micro_batch_tokens=config.trainer.token_budget,
        shaping={domain.name: how for domain in config.domains if (how := domain.shaping) is not None},
        losses=losses_of(config),
        kl=config.kl_control.controller if config.kl_control else None,
        on_update=config.engine.on_update,
        vocab_size=vocab_size(config.model.resolved),
        routing=routing_of(config),
        publish_timeout_s=config.weights.timeout_s,
        scope=config.staleness.scope,
        overdue_s=config.staleness.overdue_s if config.staleness.overdue is Overdue.WAIT else None,
        mini_batching=mini_batching_of(config),
        schedule=LearningRateSchedule(
            warmup_steps=config.optimizer.warmup_steps,
            steps=config.optimizer_steps,
            shape=config.optimizer.schedule,
            final_fraction=config.optimizer.final_fraction,
        ),
    )
