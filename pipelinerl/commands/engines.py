"""The fleet of a live run as people see it: a table, and waiting for an engine to come or to be gone."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from pipelinerl.controller.client import ControllerClient
from pipelinerl.controller.state.fleet import base_url
from pipelinerl.errors import DeadlineError, UserError
from pipelinerl.observability.status import EngineStatus, FleetStatus

_POLL_S: Final = 0.2
#: An engine must have joined by then: it loads a model, and waits for a publication.
_JOIN_S: Final = 300.0


def table(fleet: FleetStatus) -> list[str]:
    """A line for each engine, under a heading, and one for each that has not come yet."""
    names = {engine.name for engine in fleet.engines}
    heading = _row("name", "type", "lifecycle", "version", "running", "waiting", "tokens/s", "url")
    waiting = [
        _row(h.name, h.type, "requested", "-", "-", "-", "-", "") for h in fleet.requested if h.name not in names
    ]
    return [heading, *map(line, fleet.engines), *waiting]


def line(engine: EngineStatus) -> str:
    """One engine as a row of the table."""
    row = _row(
        engine.name or "-",
        engine.type or "-",
        engine.state,
        str(engine.version),
        str(engine.running),
        str(engine.waiting),
        f"{engine.tokens_per_s:.0f}",
        engine.url,
    )
    return f"{row}  {engine.last_error}".rstrip()


def joined(controller: ControllerClient, which: str, *, logs: Path, within_s: float = _JOIN_S) -> EngineStatus:
    """Wait until the engine serves.

    Raises:
        UserError: it was expelled, or cannot be had; DeadlineError: it has not come in time.
    """
    engine = _until(
        controller, which, lambda engine: engine.serves or engine.state == "expelled", within_s, "serve", logs
    )
    if engine.state == "expelled":
        raise UserError(f"{which} was expelled: {engine.last_error}")
    return engine


def gone(controller: ControllerClient, which: str, *, within_s: float) -> EngineStatus:
    """Wait until the engine is out; raises DeadlineError when it is not in time."""
    return _until(controller, which, lambda engine: engine.state == "expelled", within_s, "be out", None)


def _until(
    controller: ControllerClient,
    which: str,
    reached: Callable[[EngineStatus], bool],
    within_s: float,
    what: str,
    logs: Path | None,
) -> EngineStatus:
    hint = "" if logs is None else f"; see {logs}"
    deadline = time.monotonic() + within_s
    lifecycle = "not heard of"
    while time.monotonic() < deadline:
        fleet = controller.engines()
        for engine in fleet.engines:
            if base_url(which) in (engine.url, engine.name):
                lifecycle = f"{engine.state} {engine.last_error}".strip()
                if reached(engine):
                    return engine
        if lifecycle == "not heard of" and which in fleet.to_stop:
            raise UserError(f"{which} did not come, and the run goes on without it{_last_word(which, logs)}{hint}")
        time.sleep(_POLL_S)
    raise DeadlineError(f"{which} should {what} within {within_s:g} s, and is {lifecycle}{hint}")


def _last_word(which: str, logs: Path | None) -> str:
    """The sentence with which its log ends, if it does, and is here: what a user can mend."""
    log = None if logs is None else logs / f"{which}.log"
    lines = log.read_text(errors="replace").splitlines() if log is not None and log.is_file() else []
    sentence = lines[-1].removeprefix("pipelinerl: ") if lines else ""
    return f": {sentence}" if lines and sentence != lines[-1] else ""


def _row(name: str, type: str, lifecycle: str, version: str, running: str, waiting: str, rate: str, url: str) -> str:
    counts = f"{version:>8}{running:>9}{waiting:>9}{rate:>10}"
    return f"{name:<12}{type:<10}{lifecycle:<10}{counts}  {url}".rstrip()
