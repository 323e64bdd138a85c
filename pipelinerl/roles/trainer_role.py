"""The trainer's process: builds the workers (models), the training loop, the weight publisher and the checkpoints."""

from __future__ import annotations

import asyncio
import logging
import signal
from functools import partial

from pipelinerl import registry
from pipelinerl.config.recipe import RunConfig
from pipelinerl.engines.http.client import EngineClient
from pipelinerl.enums import Overdue
from pipelinerl.models.checkpoint import vocab_size
from pipelinerl.models.tokenizer import decoder_of
from pipelinerl.objective.presets import no_signal_of
from pipelinerl.roles.engine_rules import canary_of, replica_of, routing_of
from pipelinerl.roles.process import Identity, freeze_gc
from pipelinerl.roles.wiring import checkpoints_of, objective_of
from pipelinerl.roles.workers import close_workers, started
from pipelinerl.streams.stream import Stream
from pipelinerl.system.cores import ComputeCores
from pipelinerl.trainers.ranks.rank0 import leave_undone
from pipelinerl.training.canary_check import check_canary
from pipelinerl.training.loop import LoopSettings, TrainingLoop, training_loop
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.training.step_samples import StepSamples
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
    restored, step = checkpoints.start_from_newest(
        lambda checkpoint, version: started(config, objective, checkpoint=checkpoint, version=version),
        attempts=1 if config.trainer_processes > 1 else 5,  # several processes start again together
    )
    checkpoints.prepare(step.policy.weight_layout())
    stream = await identity.stream()
    client = EngineClient(token=identity.token)
    samples, grace = samples_of(identity), Grace()
    set_threads = registry.TRAINERS[config.trainer.type].use_threads if config.may_take_turns else ""
    cores = ComputeCores(set_threads, config.launch.threads)
    loop = training_loop(
        loop_settings(config),
        step=step,
        objective=objective,
        stream=stream,
        publisher=publisher_of(identity, client, stream, grace),
        check_canary=partial(check_canary, canary_of(config), client, grace),
        replica=replica_of(config, step.policy.weight_layout()),
        checkpoints=checkpoints,
        restored=restored,
        at=lambda version: process_log.at(step=version, model_version=version),
        use_cores=cores.use if set_threads else lambda shared: None,
        samples=samples,
    )
    freeze_gc()
    was_told_to_leave = _leave_on_sigterm(loop, config.launch.save_s)
    try:
        await loop.run()
        if was_told_to_leave.is_set():
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


def _leave_on_sigterm(training: TrainingLoop, save_s: float) -> asyncio.Event:
    """Give the trainer `save_s` after a first SIGTERM, which sets the event, to save its state; a second cancels it."""
    task, events, was_given = asyncio.current_task(), asyncio.get_running_loop(), asyncio.Event()
    assert task is not None

    def leave() -> None:
        if was_given.is_set():
            task.cancel()
            return
        log.info("stopping: saving the state first, within %g s", save_s)
        was_given.set()
        training.leave()
        events.call_later(save_s, task.cancel)

    events.add_signal_handler(signal.SIGTERM, leave)
    return was_given


def publisher_of(identity: Identity, control: EngineControl, stream: Stream, grace: Grace) -> Publisher:
    """Return the publisher for the recipe's transport; raise `RecipeError` if a server or a backend is missing."""
    transport = identity.config.weights.transport
    publisher: Publisher = registry.load("weights.transport", registry.TRANSPORTS, transport)(
        identity, control, stream, grace
    )
    return publisher


def samples_of(identity: Identity) -> StepSamples | None:
    """Return the recorder of samples from training steps; None if the recipe keeps no samples."""
    config, log = identity.config, identity.sample_log("training")
    if log is None:
        return None
    decode, most = decoder_of(config.model.resolved), config.samples.groups_per_step
    return StepSamples(log, decode, seed=config.run.seed, groups_per_step=most)


def loop_settings(config: RunConfig) -> LoopSettings:
    """Return the settings in the recipe that the training loop uses."""
    return LoopSettings(
        no_signal=config.training.no_signal or no_signal_of(config.objective),
        deadline_s=config.training.deadline_s,
        tokens_per_step=config.training.tokens_per_step,
        kl=config.kl_control.controller if config.kl_control else None,
        on_update=config.engine.on_update,
        vocab_size=vocab_size(config.model.resolved),
        routing=routing_of(config),
        publish_timeout_s=config.weights.timeout_s,
        scope=config.staleness.scope,
        overdue_s=config.staleness.overdue_s if config.staleness.overdue is Overdue.WAIT else None,
        schedule=LearningRateSchedule(
            warmup_steps=config.optimizer.warmup_steps,
            steps=config.optimizer_steps,
            shape=config.optimizer.schedule,
            final_fraction=config.optimizer.final_fraction,
        ),
    )
