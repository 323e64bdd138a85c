"""The trainer's process: a backend, the training loop around it, the publisher, the checkpoints."""

from __future__ import annotations

from pathlib import Path

from pipelinerl import registry
from pipelinerl.config import RunConfig
from pipelinerl.engines.http_client import EngineClient
from pipelinerl.errors import ModelError
from pipelinerl.roles.parts import checkpoints_of, objective_of
from pipelinerl.roles.process import Identity
from pipelinerl.training.loop import LoopSettings, TrainingLoop
from pipelinerl.training.schedule import LearningRateSchedule
from pipelinerl.weights.broadcast import BroadcastPublisher
from pipelinerl.weights.layout import wire_layout
from trainer_contract.errors import SpecError
from trainer_contract.trainer import Trainer
from trainer_contract.types import OptimizerSpec, TrainerSpec


async def run(identity: Identity) -> None:
    """Train until the controller says stop, or the process is told to."""
    config = identity.config
    process_log = identity.log()
    objective = objective_of(config)
    checkpoints = checkpoints_of(config, identity.run_dir)
    latest = checkpoints.latest()
    trainer: Trainer = registry.load("trainer.type", registry.TRAINERS, config.trainer.type)()
    try:
        trainer.init_worker(spec_of(config, restore_from=latest[0] / "trainer" if latest else None))
    except SpecError as error:
        raise ModelError(f"trainer: {error}") from error
    stream = await identity.stream()
    client = EngineClient(token=identity.token)
    loop = TrainingLoop(
        loop_settings(config),
        trainer=trainer,
        layout=wire_layout(trainer.weight_layout()),
        objective=objective,
        stream=stream,
        publisher=BroadcastPublisher(client),
        checkpoints=checkpoints,
        restored=latest[1] if latest else None,
        at=lambda version: process_log.at(step=version, model_version=version),
    )
    try:
        await loop.run()
    finally:
        await loop.close()
        await client.close()
        await stream.close()
        trainer.close()


def spec_of(config: RunConfig, *, restore_from: Path | None) -> TrainerSpec:
    """The backend's part of the recipe."""
    return TrainerSpec(
        model_path=config.model.resolved,
        seed=config.run.seed,
        precision=config.trainer.precision,
        device=config.trainer.device,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        optimizer=OptimizerSpec(
            betas=config.optimizer.betas,
            eps=config.optimizer.eps,
            weight_decay=config.optimizer.weight_decay,
            grad_clip=config.optimizer.grad_clip,
        ),
        restore_from=restore_from,
    )


def loop_settings(config: RunConfig) -> LoopSettings:
    """The training loop's part of the recipe."""
    return LoopSettings(
        micro_batch_tokens=config.trainer.micro_batch_tokens,
        tokens_per_step=config.training.tokens_per_step,
        no_signal=config.training.no_signal,
        deadline_s=config.training.deadline_s,
        on_update=config.engine.on_update,
        schedule=LearningRateSchedule(
            warmup_steps=config.optimizer.warmup_steps,
            steps=config.run.steps,
            shape=config.optimizer.schedule,
            final_fraction=config.optimizer.final_fraction,
        ),
    )
