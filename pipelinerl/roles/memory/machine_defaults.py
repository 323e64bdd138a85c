"""`settled`: resolves the recipe's machine-dependent defaults once, when a run begins.

    engine.dtype = "auto"                float32 if engines compute on a CPU, else the model directory's
    trainer.micro_batch_tokens = "auto"  as many tokens as the device holds, up to 16,384

The values are recorded in the run's own recipe, so a resumed run computes the same. Only the memory's total size
counts, not the free part, so the same recipe on the same machine gives the same steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pipelinerl import registry
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import MOST_TOKENS
from pipelinerl.errors import ModelError, RecipeError
from pipelinerl.models.checkpoint import model_dtype
from pipelinerl.roles.memory.prediction import fits, predict
from pipelinerl.roles.wiring import objective_of
from pipelinerl.system.machine import has_accelerator
from trainer_contract.errors import SpecError
from trainer_contract.types import Device, WeightDType

#: Fraction of a device's memory that the predicted part may fill. Libraries, the stream server and verifiers, which are
#: not predicted, use the rest.
_USED: Final = 0.8
_LEAST_TOKENS: Final = 1024
#: Engines that cast weights to the recipe's dtype.
_CASTING: Final = frozenset({"torch", "jax", "vllm"})


def host_memory() -> int:
    """Return this machine's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def settled(config: RunConfig, limits: Mapping[str, int] | None = None) -> RunConfig:
    """Replace `auto` values in the recipe; `limits` are bytes by kind of process, as in `prediction.lines`.

    A recipe that `check` would refuse is returned unchanged, because `check` has the better error message.
    """
    try:
        return _with_tokens(_with_dtype(config), {"all": host_memory()} if limits is None else limits)
    except (ModelError, RecipeError, SpecError):
        return config


def _with_dtype(config: RunConfig) -> RunConfig:
    section = config.engine
    if section.dtype != "auto" or section.type not in _CASTING:
        return config
    on_cpu = section.device is Device.CPU or section.type in registry.ON_THE_HOST
    if not (on_cpu or (section.device is Device.AUTO and not has_accelerator())):
        return config
    if model_dtype(config.model.resolved) is WeightDType.FLOAT32:
        return config
    return config.model_copy(update={"engine": section.model_copy(update={"dtype": WeightDType.FLOAT32})})


def _with_tokens(config: RunConfig, limits: Mapping[str, int]) -> RunConfig:
    if config.trainer.micro_batch_tokens != "auto":
        return config
    predicted = predict(config, objective_of(config))
    usable = {kind: int(size * _USED) for kind, size in limits.items()}
    tokens = MOST_TOKENS
    while tokens > _LEAST_TOKENS and predicted.trainer is not None:
        tried = _with_budget(config, tokens)
        if fits(replace(predicted, trainer=predict(tried, objective_of(tried)).trainer), limits=usable):
            break
        tokens //= 2
    return _with_budget(config, tokens)


def _with_budget(config: RunConfig, tokens: int) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"micro_batch_tokens": tokens})})
