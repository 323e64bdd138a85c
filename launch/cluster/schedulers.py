"""What can start a run's nodes on other machines, by the word after `--on`: how a plan is shown for it, how it begins.

To add one: a member of `Scheduler`, a line in `rendered` and one in `start_on`, and a file that renders `pipelinerl
node` for each host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from launch.cluster import slurm
from launch.cluster.membership import Members
from launch.run import prepare
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError


class Scheduler(StrEnum):
    """What starts nodes."""

    SLURM = "slurm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Elsewhere:
    """Where a run is to be: by what, on which hosts, with what its user adds for that."""

    by: Scheduler
    members: Members
    slurm_options: Sequence[str] = ()


def read_scheduler(word: str) -> Scheduler:
    """The scheduler of `--on`. Raises UserError for a word that names none."""
    try:
        return Scheduler(word)
    except ValueError:
        raise UserError(f"--on must be one of {', '.join(Scheduler)}, got {word!r}") from None


def rendered(config: RunConfig, where: Elsewhere, run_dir: Path) -> str:
    """What the scheduler would be given for a run in `run_dir`; nothing is started."""
    return slurm.slurm_script(config, where.members, run_dir=run_dir, extra=where.slurm_options)


def start_on(
    config: RunConfig, where: Elsewhere, *, claim: Callable[[RunConfig], bool], announce: Callable[[str], None] = print
) -> int:
    """Begin a run there; returns the exit status: 0 when it is begun.

    Raises:
        UserError: it cannot be; the message says what to do.
    """
    run_dir = prepare(config, claim=claim, members=where.members)
    announce(f"run {run_dir.name} in {run_dir}")
    announce(slurm.submit(rendered(config, where, run_dir), run_dir))
    return 0
