"""Refuse to start a second run of a name while one is live: both would share the machine, and nobody asked for two."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from launch.run_directory import holder_of, namesakes
from pipelinerl.commands.remote import controller_of
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError

#: How long the controller of a run whose services were started by hand may take to answer.
_ANSWERS_S: Final = 2.0


def refuse_namesake(config: RunConfig) -> None:
    """Return when no run of this name is live.

    Raises:
        UserError: one is, under a launcher or with services started by hand; the message says what to type instead.
    """
    for path in namesakes(config):
        runner = f"process {pid}" if (pid := holder_of(path)) is not None else _by_hand(path)
        if runner:
            raise UserError(
                f"a run of this name is live in {path} ({runner}): to look at it, pipelinerl top {path}; to end it, "
                f"pipelinerl stop {path}; to go on with it once it has ended, pipelinerl run --resume {path}; to start "
                "another one beside it on this machine, add --new"
            )


def _by_hand(path: Path) -> str:
    """Return where the controller of a run without a launcher answers; empty when none does."""
    if not (path / "controller.json").is_file():
        return ""
    try:
        with controller_of(path, timeout_s=_ANSWERS_S) as controller:
            controller.status()
            return f"services started by hand, controller at {controller.url}"
    except UserError:
        return ""
