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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from pipelinerl.commands.remote import controller_of, is_url
from pipelinerl.errors import UserError
from pipelinerl.observability.events import Event, number, sentence
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
from pipelinerl.plugins.watch.page.event_tail import EventTail
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
    """A sentence for the user, usually the result of a knob's change.

    `refused` is True if it reports an error: the controller has refused the change, or does not answer.
    """

    sentence: str
    refused: bool = False


@dataclass(slots=True)
class RunSource:
    """One run, named by its directory or by its controller's URL; for use from one thread only."""

    run: str
    total_steps: int = 0
    _view: RunView = field(default_factory=RunView)
    _tail: EventTail | None = None
    _newest: RunSnapshot | None = None
    _unread: int = 0

    def __post_init__(self) -> None:
        if not is_url(self.run):
            self._tail = EventTail(Path(self.run) / "events.jsonl")
            self.total_steps = _steps_of(Path(self.run) / "recipe.toml")

    def look(self) -> RunSnapshot:
        """Return the run's current state, from the controller or else from the files."""
        self._read()
        waits = self._waits()
        try:
            with controller_of(self.run, timeout_s=_TIMEOUT_S) as controller:
                status = controller.status()
        except UserError as error:
            self._newest = self._by_files(str(error), waits)
        else:
            self._newest = RunSnapshot(
                status=status, state="live", knobs=flat(status.knobs), ledger=status.ledger, waits=waits,
                reading=self._share, unread=self._unread,
            )  # fmt: skip
        return self._newest

    def change(self, name: str, value: str) -> ChangeResult:
        """Set a knob to a value that the user typed."""
        try:
            with controller_of(self.run, timeout_s=_TIMEOUT_S) as controller:
                answer = controller.change_knobs({name: value})
        except UserError as error:
            return ChangeResult(without_secrets(str(error)), refused=True)
        return ChangeResult(f"{name} = {flat(answer.knobs).get(name, value)}, effective {answer.effective}")

    @property
    def _share(self) -> float:
        return 1.0 if self._tail is None else self._tail.share

    def _read(self) -> None:
        until = time.monotonic() + _PIECE_S
        while self._tail is not None:
            try:
                piece = self._tail.read()
            except OSError:
                return
            if piece.is_new_file:
                self._view, self._unread = RunView(), 0
            for event in piece.events:
                self._take(event)
            if not self._tail.is_behind or time.monotonic() > until:
                return

    def _take(self, event: Event) -> None:
        try:
            self._view.take(event)
        except Exception:  # the log is untrusted: one malformed event must not hide the run
            self._unread += 1

    def _waits(self) -> tuple[tuple[str, float], ...]:
        waits = overview(self._view, window=_WINDOW)["waits"] if self._view.recent else []
        return tuple((each["culprit"], each["share"]) for each in waits if each["share"])

    def _by_files(self, why: str, waits: tuple[tuple[str, float], ...]) -> RunSnapshot:
        view = self._view
        if self._tail is None or (not view.newest and not (Path(self.run) / "recipe.toml").exists()):
            if self._newest is not None:  # keep showing the last known state of the run
                return replace(self._newest, state="silent", obstacle=without_secrets(why))
            raise UserError(why)
        return RunSnapshot(
            status=status_of(view, name=Path(self.run).resolve().name, total_steps=self.total_steps),
            state=state_without_controller(view),
            knobs=flat(view.knobs),
            ledger=_ledger_of(view),
            waits=waits,
            obstacle="the run is over: its knobs cannot be changed" if view.state else without_secrets(why),
            reading=self._share,
            unread=self._unread,
        )


class RunFollower:
    """Thread that follows a run from the object's creation until `close`."""

    def __init__(self, source: RunSource) -> None:
        self.snapshot: RunSnapshot | None = None
        self.result: ChangeResult | None = None
        self._source = source
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
                self.snapshot = self._source.look()
            except UserError as error:
                self.result = ChangeResult(without_secrets(str(error)), refused=True)
            try:
                wanted = self._wanted.get(timeout=_EVERY_S)
            except queue.Empty:
                continue
            if wanted is None:
                return
            self.result = self._source.change(*wanted)


def source_of(run: str) -> RunSource:
    """Return the `RunSource` of a run's directory or a controller's URL; raise `UserError` if a directory is no run."""
    if not is_url(run) and not any((Path(run) / name).exists() for name in ("events.jsonl", "recipe.toml")):
        raise UserError(f"{run} is not a run: it has neither events.jsonl nor recipe.toml; name the run's directory")
    return RunSource(run)


def status_of(view: RunView, *, name: str, total_steps: int) -> RunStatus:
    """Return as much of a run's status as its event log contains."""
    step = view.recent[-1] if view.recent else {}
    by_domain = step.get("by_domain")
    domains = by_domain if isinstance(by_domain, dict) else {}
    figures = {
        str(domain): {figure: value for figure in each if (value := number(each, figure)) is not None}
        for domain, each in domains.items()
        if isinstance(each, dict)
    }
    return RunStatus(
        run=str(view.started.get("run") or name),
        step=view.step,
        total_steps=whole(view.started, "total_steps") or total_steps,
        model_version=whole(step, "model_version") or view.step,
        last_step=LastStepStatus(
            reward=number(step, "reward"),
            unjudged=unjudged_share(figures),
            staleness_mean=number(step, "staleness_mean") or 0.0,
            staleness_max=int(number(step, "staleness_max") or 0.0),
            entropy=number(step, "entropy"),
            exact_entropy=number(step, "exact_entropy"),
            length_mean=number(step, "length_mean"),
            truncated=number(step, "truncated"),
            by_domain=figures,
        ),
        held_out=_held_out(view),
        fleet=FleetStatus(
            engines=tuple(
                EngineStatus(url=url, state=each["state"], version=each["version"] or 0, last_error=each["last_error"])
                for url, each in view.engines.items()
            ),
            tokens_per_s=number(view.fleet, "tokens_per_s") or 0.0,
            occupancy=number(view.fleet, "occupancy") or 0.0,
            update_pause_s=view.pauses_s[-1] if view.pauses_s else 0.0,
        ),
        alarms=tuple(sentence(event) for event in view.alarms.values()),
        elapsed_s=number(view.newest, "elapsed_s") or 0.0,
    )


def _held_out(view: RunView) -> HeldOutStatus:
    if not view.evaluations:
        return HeldOutStatus()
    name, event = next(iter(view.evaluations.items()))
    return HeldOutStatus(
        name=name,
        version=whole(event, "model_version"),
        accuracy=number(event, "accuracy"),
        low=number(event, "low"),
        high=number(event, "high"),
    )


def _ledger_of(view: RunView) -> LedgerStatus | None:
    known = {name: value for name in LedgerStatus.__struct_fields__ if (value := whole(view.ledger, name)) is not None}
    return LedgerStatus(**known) if known else None


def _steps_of(recipe: Path) -> int:
    try:
        section = tomllib.loads(recipe.read_text()).get("run")
    except (OSError, ValueError):
        return 0
    return (whole(section, "steps") or 0) if isinstance(section, dict) else 0
