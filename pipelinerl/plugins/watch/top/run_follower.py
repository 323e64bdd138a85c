"""`RunFollower`: the state of one run, from its controller if that answers, otherwise from the run's files.

A thread polls the controller and reads the files, so that drawing the newest `RunSnapshot` never blocks. The same
thread changes knobs through the controller, one at a time.
"""

from __future__ import annotations

import queue
import threading
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pipelinerl.commands.remote import controller_of, is_url
from pipelinerl.errors import UserError
from pipelinerl.observability.events import EventFollower, amount, number, sentence
from pipelinerl.observability.logs import without_secrets
from pipelinerl.observability.status import (
    EngineStatus,
    FleetStatus,
    HeldOutStatus,
    LastStepStatus,
    LedgerStatus,
    RunStatus,
    unjudged_share,
)
from pipelinerl.plugins.watch.page.now import overview
from pipelinerl.plugins.watch.page.run_view import RunView, whole
from pipelinerl.plugins.watch.steering import flat, state_without_controller

#: Seconds between two polls of the controller and the files.
_EVERY_S: Final = 1.0
_TIMEOUT_S: Final = 5.0
#: Seconds after which reading a long log is interrupted to show how much has been read.
_PIECE_S: Final = 0.5
#: Number of steps over which waits are averaged.
_WINDOW: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        status: the controller's status; if no controller answers, as much of the status as the files contain.
        state: live, starting, finished, suspended, failed, crashed, or silent (no answer any more, and no files here).
        knobs: values by name, domain weights as `domain_weights.<name>`.
        ledger: counts of orders for prompts, by outcome; None if unknown.
        waits: pairs (cause, share of the last steps' time spent on this wait), if the run's files are on this machine.
        obstacle: the reason why knobs cannot be changed; empty if they can.
        reading: the share of the event log that has been read.
        unread: the number of events that could not be processed.
    """

    status: RunStatus
    state: str
    knobs: Mapping[str, Any]
    ledger: LedgerStatus | None
    waits: tuple[tuple[str, float], ...] = ()
    obstacle: str = ""
    reading: float = 1.0
    unread: int = 0


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """A sentence for the user; `refused` is True if it is an error, or the controller does not answer."""

    sentence: str
    refused: bool = False


class RunFollower:
    """Thread that follows a run, named by its directory or by its controller's URL, until `close`."""

    def __init__(self, run: str) -> None:
        """Start the thread; raise `UserError` if the directory holds no run."""
        self.snapshot: RunSnapshot | None = None
        self.result: ChangeResult | None = None
        self._run = run
        self._directory = None if is_url(run) else Path(run)
        self._log: EventFollower | None = None
        self._total_steps = 0
        if self._directory is not None:
            if not any((self._directory / name).exists() for name in ("events.jsonl", "recipe.toml")):
                raise UserError(
                    f"{run} is not a run: it has neither events.jsonl nor recipe.toml; name the run's directory"
                )
            self._log = EventFollower(self._directory / "events.jsonl")
            self._total_steps = _steps_of(self._directory / "recipe.toml")
        self._view = RunView()
        self._unread = 0
        self._wanted: queue.SimpleQueue[tuple[str, str] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._follow, name="follow-run", daemon=True)
        self._thread.start()

    def change(self, name: str, value: str) -> None:
        """Queue a change of a knob; the follower's `result` is set when the controller has answered."""
        self._wanted.put((name, value))

    def close(self, *, timeout_s: float = 1.0) -> None:
        """Stop the thread; a pending request is abandoned after `timeout_s`."""
        self._wanted.put(None)
        self._thread.join(timeout_s)

    def _follow(self) -> None:
        while True:
            try:
                self.snapshot = self._look()
            except UserError as error:
                self.result = ChangeResult(without_secrets(str(error)), refused=True)
            try:
                wanted = self._wanted.get(timeout=_EVERY_S)
            except queue.Empty:
                continue
            if wanted is None:
                return
            name, value = wanted
            try:
                with controller_of(self._run, timeout_s=_TIMEOUT_S) as controller:
                    answer = controller.change_knobs({name: value})
            except UserError as error:
                self.result = ChangeResult(without_secrets(str(error)), refused=True)
            else:
                changed = flat(answer.knobs).get(name, value)
                self.result = ChangeResult(f"{name} = {changed}, effective {answer.effective}")

    def _look(self) -> RunSnapshot:
        self._read()
        view = self._view
        waits = overview(view, window=_WINDOW)["waits"] if view.recent else []
        shares = tuple((each["culprit"], each["share"]) for each in waits if each["share"])
        reading = 1.0 if self._log is None else self._log.share
        try:
            with controller_of(self._run, timeout_s=_TIMEOUT_S) as controller:
                status = controller.status()
        except UserError as error:
            why = without_secrets(str(error))
        else:
            return RunSnapshot(
                status=status, state="live", knobs=flat(status.knobs), ledger=status.ledger, waits=shares,
                reading=reading, unread=self._unread,
            )  # fmt: skip
        if self._directory is None or (not view.newest and not (self._directory / "recipe.toml").exists()):
            if self.snapshot is not None:  # keep showing the last known state of the run
                return replace(self.snapshot, state="silent", obstacle=why)
            raise UserError(why)
        known = {
            name: value for name in LedgerStatus.__struct_fields__ if (value := whole(view.ledger, name)) is not None
        }
        return RunSnapshot(
            status=status_of(view, name=self._directory.resolve().name, total_steps=self._total_steps),
            state=state_without_controller(view),
            knobs=flat(view.knobs),
            ledger=LedgerStatus(**known) if known else None,
            waits=shares,
            obstacle="the run is over: its knobs cannot be changed" if view.state else why,
            reading=reading,
            unread=self._unread,
        )

    def _read(self) -> None:
        until = time.monotonic() + _PIECE_S
        while self._log is not None:
            try:
                events = self._log.new()
            except OSError:
                return
            if self._log.is_replaced:
                self._view, self._unread = RunView(), 0
            for event in events:
                try:
                    self._view.take(event)
                except Exception:  # the log is untrusted: one malformed event must not hide the run
                    self._unread += 1
            if not self._log.is_behind or time.monotonic() > until:
                return


def status_of(view: RunView, *, name: str, total_steps: int) -> RunStatus:
    """Return as much of a run's status as its event log contains."""
    step = view.recent[-1] if view.recent else {}
    by_domain = step.get("by_domain")
    figures = {
        str(domain): {figure: value for figure in each if (value := number(each, figure)) is not None}
        for domain, each in (by_domain.items() if isinstance(by_domain, dict) else ())
        if isinstance(each, dict)
    }
    held_out, (set_name, evaluation) = HeldOutStatus(), next(iter(view.evaluations.items()), ("", {}))
    if evaluation:
        fields: dict[str, Any] = {field: number(evaluation, field) for field in ("accuracy", "low", "high")}
        held_out = HeldOutStatus(name=set_name, version=whole(evaluation, "model_version"), **fields)
    means = ("reward", "entropy", "exact_entropy", "length_mean", "truncated")
    last: dict[str, Any] = {field: number(step, field) for field in means}
    return RunStatus(
        run=str(view.started.get("run") or name),
        step=view.step,
        total_steps=whole(view.started, "total_steps") or total_steps,
        model_version=whole(step, "model_version") or view.step,
        last_step=LastStepStatus(
            unjudged=unjudged_share(figures),
            staleness_mean=amount(step, "staleness_mean"),
            staleness_max=int(amount(step, "staleness_max")),
            by_domain=figures,
            **last,
        ),
        held_out=held_out,
        fleet=FleetStatus(
            engines=tuple(
                EngineStatus(url=url, state=each["state"], version=each["version"] or 0, last_error=each["last_error"])
                for url, each in view.engines.items()
            ),
            tokens_per_s=amount(view.fleet, "tokens_per_s"),
            occupancy=amount(view.fleet, "occupancy"),
            update_pause_s=view.pauses_s[-1] if view.pauses_s else 0.0,
        ),
        alarms=tuple(sentence(event) for event in view.alarms.values()),
        elapsed_s=amount(view.newest, "elapsed_s"),
    )


def _steps_of(recipe: Path) -> int:
    try:
        section = tomllib.loads(recipe.read_text()).get("run")
    except (OSError, ValueError):
        return 0
    return (whole(section, "steps") or 0) if isinstance(section, dict) else 0
