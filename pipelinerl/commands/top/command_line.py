"""The command `pipelinerl top`: a run's figures and knobs in the terminal, also over ssh."""

from __future__ import annotations

import sys
from importlib.util import find_spec

from pipelinerl.commands.engines import Run
from pipelinerl.errors import UserError


def top(run: Run) -> None:
    """Show a run in the terminal and change its knobs while it is live; q quits."""
    if find_spec("textual") is None:
        raise UserError("pipelinerl top needs textual, which is not installed; pip install 'pipelinerl[top]'")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(f"pipelinerl top needs a terminal; try pipelinerl status {run}")
    from pipelinerl.commands.top.run_follower import RunFollower, source_of
    from pipelinerl.commands.top.textual_app import show

    follower = RunFollower(source_of(run))
    try:
        show(follower)
    finally:
        follower.close()
