"""Finds a live run's controller, through the run's directory or by its URL, for the commands that talk to it."""

from __future__ import annotations

import getpass
import os
from pathlib import Path

import msgspec

from pipelinerl.config.recipe import check_layout
from pipelinerl.controller.client import TIMEOUT_S, ControllerClient
from pipelinerl.errors import UserError
from pipelinerl.observability.events import read_events
from pipelinerl.observability.run_history import tell
from pipelinerl.roles.process import read_token

#: How long a controller may take to show that it is there.
_ANSWERS_S = 2.0


class ControllerAddress(msgspec.Struct, frozen=True):
    """What a controller leaves in its run's directory, as `controller.json`."""

    url: str
    token: str | None


def controller_of(run: Path | str, *, timeout_s: float = TIMEOUT_S) -> ControllerClient:
    """The controller of the run in a directory, or at a URL; then with the token of $PIPELINERL_TOKEN.

    Args:
        timeout_s: for which it may keep a question waiting.

    Raises:
        UserError: no run is live in the directory, or one that another version of the project began.
    """
    address = address_of(run)
    return ControllerClient(address.url, address.token, who=_user(), timeout_s=timeout_s)


def started_by_hand(run_dir: Path) -> str:
    """Return where the controller of a live run that has no launcher answers, in words; empty when none does."""
    if not (run_dir / "controller.json").is_file():
        return ""
    try:
        with controller_of(run_dir, timeout_s=_ANSWERS_S) as controller:
            controller.status()
            return f"services started by hand, controller at {controller.url}"
    except UserError:
        return ""


def address_of(run: Path | str) -> ControllerAddress:
    """Where that controller is; raises as `controller_of` does."""
    if is_url(run):
        return ControllerAddress(str(run).rstrip("/"), read_token(None))
    check_layout(Path(run))
    endpoint = Path(run) / "controller.json"
    try:
        return msgspec.json.decode(endpoint.read_bytes(), type=ControllerAddress)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise UserError(f"{run} has no live run: {_why_none(Path(run))}") from None


def _why_none(run_dir: Path) -> str:
    """What is in the directory instead of a run that is live, and what can be done with that."""
    if not run_dir.is_dir():
        return "there is no such directory"
    if not (run_dir / "recipe.toml").is_file():
        return "it is no run's directory, which would hold recipe.toml"
    try:
        last = tell(read_events(run_dir / "events.jsonl")).finished
    except (OSError, ValueError):
        last = None
    if last is None:
        return f"it is starting, or has died; pipelinerl run --resume {run_dir} goes on with it"
    if last["kind"] == "run_finished":
        return f"it is over, {last.get('reason', 'finished')}; pipelinerl samples, report and watch show it"
    return f"it has ended, {last.get('reason', last['kind'])}; pipelinerl run --resume {run_dir} goes on with it"


def is_url(run: Path | str) -> bool:
    """Is a run named by its controller's URL, and not by its directory?"""
    return str(run).startswith(("http://", "https://"))


def _user() -> str:
    """Who asks, for the log of changes; a container may run as somebody without a name."""
    try:
        return getpass.getuser().encode("ascii", "replace").decode()
    except (KeyError, OSError):
        return f"user {os.getuid()}"
