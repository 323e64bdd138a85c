"""Findings on the schedule: how batches are divided into optimizer steps, and which share of tokens becomes too old."""

from __future__ import annotations

import math
from typing import Final

from rich.table import Table

from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.plugins.simulation.from_recipe import setting_of
from pipelinerl.plugins.simulation.hardware import EngineTimes, Hardware, TrainerTimes
from pipelinerl.plugins.simulation.setting import HeavyTailedLengths
from pipelinerl.plugins.simulation.simulator import simulate
from pipelinerl.roles.wiring import knobs_of
from pipelinerl.training.replay import RecordedStep

_PLACE: Final = ("epoch", "mini_batch")


def mini_batch_finding(config: RunConfig) -> str | None:
    """Describe how a batch is divided into optimizer steps; None if a batch is a single optimizer step."""
    training, k = config.training, knobs_of(config).k
    if (updates := training.epochs * training.mini_batches) == 1:
        return None
    each = config.groups_per_step / training.mini_batches
    oldest = (
        ""
        if math.isinf(k)
        else f"; with k = {k:g}, tokens train at most {k * updates:g} optimizer steps after sampling"
    )
    kl = "" if training.target_kl is None else f", fewer once the KL from π_old exceeds {training.target_kl:g}"
    return (
        f"epochs: {training.epochs}, mini-batches in each: {training.mini_batches}, of about {each:.3g} whole groups; "
        f"{updates} optimizer steps for each version{kl}{oldest}"
    )


def update_table(step: RecordedStep) -> Table | None:
    """Return a table of a training step's metrics with a row per optimizer step; None if there was only one."""
    if not step.updates:
        return None
    names = [name for name in step.updates[0] if name not in _PLACE]
    table = Table(*_PLACE, *names, title=f"optimizer steps of step {step.version}", box=None, pad_edge=False)
    for update in step.updates:
        place = [f"{update[name]:.0f}" for name in _PLACE]
        table.add_row(*place, *(f"{update[name]:.4g}" if name in update else "" for name in names))
    return table


#: Number of rollouts to simulate, which takes a second or two.
_ROLLOUTS: Final = 16_000
_LEAST_STEPS: Final = 12
_MOST_STEPS: Final = 200
#: Assumed lengths of answers: a heavy-tailed distribution whose median is a quarter of the maximum.
_MEDIAN: Final = 0.25
_SIGMA: Final = 0.5


def stale_share(config: RunConfig) -> str:
    """Describe the share of tokens dropped as stale in the worst case: engines that are slower than the trainer.

    The text is empty if the recipe cannot be simulated or sets no staleness bound.
    """
    if math.isinf(config.staleness.bounds.k):
        return ""
    steps = min(_MOST_STEPS, max(_LEAST_STEPS, _ROLLOUTS // config.training.rollouts_per_step))
    most = config.sampling.max_tokens
    lengths = HeavyTailedLengths(median=max(1.0, _MEDIAN * most), sigma=_SIGMA, most=most)
    hardware = Hardware(engine=EngineTimes(step_s=0.01), trainer=TrainerTimes(token_s=0.0))
    try:
        prediction = simulate(setting_of(config, lengths=lengths, prompt_tokens=0, steps=steps), hardware)
    except (RecipeError, ValueError):
        return ""
    return f"about {prediction.discarded:.0%} of the tokens dropped as stale if engines are slower than the trainer"
