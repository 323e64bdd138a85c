"""JAX: engine and trainer for Llama-family decoders on TPUs and any other device that XLA supports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from pipelinerl.component import EngineComponent, MeshComponent, TrainerComponent
from pipelinerl.config.sections import ModelSection
from pipelinerl.section import Section

_REMEDY: Final = "pip install -e '.[jax]'"
_CHECK: Final = "pipelinerl.plugins.jax:findings"
#: Otherwise JAX reserves memory on each GPU that it sees.
_ON_CPU: Final = {"JAX_PLATFORMS": "cpu"}

ENGINE: Final = EngineComponent(
    build="pipelinerl.plugins.jax.engine.engine:from_options",
    needs=("jax",),
    remedy=_REMEDY,
    reports_policy=True,
    check=_CHECK,
    computes_experts=False,
    casts=True,
    cpu_variables=_ON_CPU,
)
TRAINER: Final = TrainerComponent(
    build="pipelinerl.plugins.jax.trainer.trainer:JaxTrainer",
    needs=("jax", "optax", "tensorstore"),
    remedy=_REMEDY,
    check_options="pipelinerl.trainers.option_table:refuse_lora",
    check=_CHECK,
    computes_experts=False,
    casts=True,
    cpu_variables=_ON_CPU,
    measures_entropy=False,
)
MESH: Final = MeshComponent(
    build="pipelinerl.plugins.jax.trainer.trainer:JaxTrainer", rank="pipelinerl.plugins.jax.trainer.trainer:as_rank"
)


def findings(section: Section, model: ModelSection, others: Mapping[str, Path]) -> Iterator[tuple[str, str]]:
    """Yield nothing; raise `ModelError` if JAX cannot compute the model."""
    from pipelinerl.models.decoder_config import read_config

    read_config(model.resolved)
    yield from ()
