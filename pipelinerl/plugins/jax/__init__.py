"""JAX: engine and trainer for Llama-family decoders on TPUs and any other device that XLA supports."""

from __future__ import annotations

from typing import Final

from pipelinerl.component import EngineComponent, TrainerComponent

_REMEDY: Final = "pip install -e '.[jax]'"

ENGINE: Final = EngineComponent(
    build="pipelinerl.plugins.jax.engine.engine:from_options", needs=("jax",), remedy=_REMEDY, reports_policy=True
)
TRAINER: Final = TrainerComponent(
    build="pipelinerl.plugins.jax.trainer.trainer:JaxTrainer",
    needs=("jax", "optax", "tensorstore"),
    remedy=_REMEDY,
    check_options="pipelinerl.trainers.option_table:refuse_lora",
    rank="pipelinerl.plugins.jax.trainer.trainer:as_rank",
)
