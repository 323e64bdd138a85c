"""Findings on batches that are trained in several optimizer steps: how they are divided, and how old their tokens may
get.
"""

from __future__ import annotations

import math
from typing import Final

from rich.table import Table

from pipelinerl.config.recipe import RunConfig
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
    """Return a table of the recorded figures of each optimizer step; None if the step had only one."""
    if not step.updates:
        return None
    names = [name for name in step.updates[0] if name not in _PLACE]
    table = Table(*_PLACE, *names, title=f"optimizer steps of step {step.version}", box=None, pad_edge=False)
    for update in step.updates:
        place = [f"{update[name]:.0f}" for name in _PLACE]
        table.add_row(*place, *(f"{update[name]:.4g}" if name in update else "" for name in names))
    return table
