"""The process of a trainer's rank above 0, which joins rank 0 (`pipelinerl trainer`) and computes with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from typing import Final, Never

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError
from pipelinerl.observability.logs import configure
from pipelinerl.trainers.ranks.follower import follow
from trainer_contract.errors import RankError, SpecError, TrainerError

_REFUSED: Final = 2
_LOST: Final = 1


def run(config: RunConfig, *, rank: int) -> Never:
    """Compute along with rank 0 until rank 0 ends, then end this process.

    The exit status is 0 if rank 0 finished its work, 1 if rank 0 died, hung or failed (a restart may help), and 2 if
    this rank cannot join rank 0. The process exits without cleanup, because JAX's own exit handler would abort when it
    cannot reach rank 0.

    Raises:
        RecipeError: the recipe's trainer has a single process, or has no such rank.
    """
    section = config.trainer
    distributed = section.options.get("distributed")
    component = registry.MESHES.get(section.type)
    if component is None or not isinstance(distributed, Mapping):
        raise RecipeError(
            f"trainer.type must be {' or '.join(registry.MESHES)} and trainer.options.distributed "
            f"must be given for a trainer of several processes, got {section.type!r} and {distributed!r}; one process "
            "is started with `pipelinerl trainer` alone"
        )
    configure(run=config.run.name, role=f"trainer-rank-{rank}")
    outlast_notice(config.launch.save_s)
    try:
        options = {**section.options, "distributed": {**distributed, "process": rank}}
        meeting, join, start = imported(component.rank)(options)
        if meeting is None or meeting.process == 0:
            raise SpecError("--rank must be 1 or above: rank 0 is `pipelinerl trainer`")
        follow(meeting, join=join, start=start, say=print)
    except SpecError as error:
        _leave(error, _REFUSED)
    except RankError as error:
        _leave(error, _LOST)
    _leave(None, 0)


def outlast_notice(save_s: float) -> None:
    """Ignore the first SIGTERM: every rank receives it, but rank 0 can save the state only while other ranks live.

    Rank 0 ends the other ranks when it ends. If rank 0 does not, this process ends `save_s` seconds after the first
    SIGTERM, or at a second one.
    """

    def start_deadline(number: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        timer = threading.Timer(save_s, os._exit, (128 + number,))
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGTERM, start_deadline)


def _leave(error: TrainerError | None, status: int) -> Never:
    if error is not None:
        print(f"pipelinerl: {error}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(status)
