"""Prediction of the memory and disk that a run needs, and the micro-batch size that fits into memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Final

from pipelinerl.component import Need
from pipelinerl.config.recipe import RunConfig
from pipelinerl.config.sections import MOST_TOKENS
from pipelinerl.enums import OldLogprobs
from pipelinerl.models.checkpoint import weight_files
from pipelinerl.models.model_shape import BYTES
from pipelinerl.plugins.memory.prediction import MemoryPrediction, fits, gib, lines, predict, trainable
from pipelinerl.roles.dtypes import dtypes_of
from pipelinerl.roles.wiring import objective_of
from pipelinerl.trainers.torch.options import MomentDType

#: Bytes for events, logs and the stream server's files, in a run of usual length.
_BESIDE: Final = 256 * 2**20


def checkpoint_bytes(config: RunConfig, predicted: MemoryPrediction) -> int:
    """Return a checkpoint's size: sent weights, fp32 masters, AdamW moments, and past weights if they are needed."""
    trainer = predicted.trainer
    if trainer is None:  # not predicted for this trainer: assume four times the model's size
        return 4 * sum(file.stat().st_size for file in weight_files(config.model.resolved))
    count, trained = trainer.shape.count, trainer.adapters if trainer.rank else trainer.shape.count
    state = (12 if trainer.moments is MomentDType.FP32 else 8) * trained * (2 if trainer.values else 1)
    sent = BYTES[dtypes_of(config).wire] * count
    history = 0
    if config.training.old_logprobs is OldLogprobs.SAMPLING_WEIGHTS:
        bounds = config.staleness.bounds
        history = math.ceil(min(bounds.k, config.run.steps) / bounds.j) * sent
    return sent + state + history


def run_bytes(config: RunConfig, predicted: MemoryPrediction) -> int:
    """Return the maximum size of the run directory: kept checkpoints, one that is being written, samples and logs."""
    made = math.ceil(config.run.steps / config.checkpoint.interval_steps) + 1
    kept = min(made, config.checkpoint.keep + config.checkpoint.keep_best + 1)
    samples = config.samples.max_bytes if config.samples.log == "on" else 0
    return kept * checkpoint_bytes(config, predicted) + samples + _BESIDE


def free_bytes(directory: Path) -> int:
    """Return the free bytes on the file system of `directory`, which need not exist yet."""
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    return shutil.disk_usage(there).free


def disk_line(config: RunConfig, predicted: MemoryPrediction) -> str:
    """Return one line on how much the run writes to its directory, and how much space is free there."""
    each, free = checkpoint_bytes(config, predicted), free_bytes(config.run_directory)
    kept = config.checkpoint.keep + config.checkpoint.keep_best
    return (
        f"up to {gib(run_bytes(config, predicted))} in {config.run_directory}, where {gib(free)} are free: "
        f"{kept} checkpoints of {gib(each)} and one more while it is written, samples, logs"
    )


def disk_faults(config: RunConfig, predicted: MemoryPrediction, place: Path | None = None) -> Iterator[str]:
    """Yield an error, with keys and values that would fit, if what the run has yet to write does not fit `place`."""
    place = place or config.run_directory
    written = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    needed, free = max(0, run_bytes(config, predicted) - written), free_bytes(place)
    if needed <= free or free == 0:  # a pseudo file system reports 0; if it is full, creating the directory fails
        return
    kept = config.checkpoint.keep + config.checkpoint.keep_best
    least = max(0, run_bytes(config.changed("checkpoint", keep=1, keep_best=0), predicted) - written)
    if kept > 1 and least <= free:
        remedy = f"set checkpoint.keep=1 checkpoint.keep_best=0 ({gib(least)}), or choose another run.directory"
    else:
        remedy = f"choose a run.directory with {gib(least if kept > 1 else needed)} free"
    yield f"run.directory: the run writes up to {gib(needed)} and {gib(free)} are free in {place}; {remedy}"


def needs(config: RunConfig, limits: Mapping[str, int], place: Path | None = None) -> Iterator[Need]:
    """Yield the lines on memory and disk; `limits` and `place` are as in `NeedsComponent`."""
    predicted = predict(config, objective_of(config))
    lacking = not fits(predicted, limits=limits)
    if (line := trainable(predicted)) is not None:
        yield Need("memory", line, lacking)
    for line in lines(predicted, limits=limits):
        yield Need("memory", line, lacking)
    yield Need("disk", disk_line(config, predicted))
    for sentence in disk_faults(config, predicted, place):
        yield Need("disk", sentence, lacking=True)


#: Fraction of the memory that the predicted processes may fill; libraries, stream server and verifiers use the rest.
_USED: Final = 0.8
_LEAST_TOKENS: Final = 1024


def with_tokens(config: RunConfig, limits: Mapping[str, int] | None = None) -> RunConfig:
    """Replace `trainer.micro_batch_tokens = "auto"` by the largest value that fits; by default, into all the memory."""
    if config.trainer.micro_batch_tokens != "auto":
        return config
    predicted = predict(config, objective_of(config))
    of_machine = {"all": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")}
    usable = {kind: int(size * _USED) for kind, size in (of_machine if limits is None else limits).items()}
    tokens = MOST_TOKENS
    while tokens > _LEAST_TOKENS and predicted.trainer is not None:
        tried = config.changed("trainer", micro_batch_tokens=tokens)
        if fits(replace(predicted, trainer=predict(tried, objective_of(tried)).trainer), limits=usable):
            break
        tokens //= 2
    return config.changed("trainer", micro_batch_tokens=tokens)
