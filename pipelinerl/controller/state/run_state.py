"""`RunState`: all that the controller knows, as one value that can be written down and read back whole.

Two records are taken of it. The journal keeps the whole, for a controller that dies while its run goes on. A checkpoint
keeps what outlives everything else (`checkpoint_record`), for a run that is started again.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, final

import msgspec

from pipelinerl.controller.state.evaluation import Evaluation, EvaluationDue, EvaluationResult
from pipelinerl.controller.state.fleet import Fleet
from pipelinerl.controller.state.issued_ledger import IssuedLedger
from pipelinerl.controller.state.knobs import KnobChange, Knobs
from pipelinerl.messages import ActorAlive, ConsumedReport, Directive, Published, TrainerReady

#: Who has not been heard of for so long may be gone. A trainer that waits says so every few seconds; an actor's heart
#: beats more often still.
SILENT_S: Final = 15.0


class RunPhase(StrEnum):
    """Where the run stands."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHING = "finishing"
    FINISHED = "finished"


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """An engine that an operator wants to be started, and whether it is still wanted.

    With `replaces` (a URL), that one is drained once this one serves; it is cleared as soon as that has been seen to.
    """

    name: str
    type: str
    replaces: str = ""
    grace_s: float = 0.0
    wanted: bool = True


@final
class RunState(msgspec.Struct, kw_only=True):
    """State of a run; changed by `Controller` alone.

    Attributes:
        first_domain_weights: those that the recipe gives.
        engine_requests: engines beyond the recipe's, in the order of asking; a resumed run begins without.
        actors: last heartbeat of each, and when it came.
        first_version, training_since: where and when this trainer began to train, for the estimate of the end.
        pending_ready: the trainer's question, while engines that are expected have not joined; awaited: their names.
        begun: the trainers' reports with which an epoch has begun; none begins another.
        answers: the last directive by the report that it answers, since a report may be repeated.
        launch: tells the launch of the run that this state is of from others; empty where roles are started by hand.
        evaluations_begun: how many, begun anew or not: the number of the last.
        evaluation_due: one that waits for weights to be served; postponed: a publication that waits for one to end.
        stop_reason, stop_sent: why the run is to end before its last step, and whether the trainer has been told.
        failure, failing_since: why the run cannot go on, and since when that is known; see `giving_up.py`.
        engineless_since: when the last engine went, or the run began without one; 0 while one is alive.
        refused_groups, refused_reason: groups in a row whose prompts were refused for good, and why the last was.
        reload_asked: (epoch, membership) for which a publication between steps was asked last.
        resumed_account: of a checkpoint, until the trainer's own account arrives.
        stepped: the trainer's account as of the last step (or of its start): what ended since then was not trained.
        trainer_heard: kind of the trainer's last report, and when it came.
        unsaved: in words, why a checkpoint cannot be written yet; training waits once the next one is due.
        progress, progressed_at, stall_told: the watchdog's: see `waiting.py`.
    """

    launch: str = ""
    knobs: Knobs
    knob_log: list[KnobChange] = []
    first_domain_weights: dict[str, float]
    fleet: Fleet = msgspec.field(default_factory=Fleet)
    engine_requests: list[EngineRequest] = []
    account: IssuedLedger = msgspec.field(default_factory=IssuedLedger)
    phase: RunPhase = RunPhase.STARTING
    epoch: int = 0
    version: int = 0
    evaluation: Evaluation | None = None
    evaluations_begun: int = 0
    evaluation_due: EvaluationDue | None = None
    postponed: bool = False
    results: list[EvaluationResult] = []
    last_step: dict[str, float] = {}
    last_publish: Published | None = None
    actors: dict[str, tuple[ActorAlive, float]] = {}
    training_since: float = 0.0
    first_version: int = 0
    pending_ready: TrainerReady | None = None
    awaited: list[str] = []
    begun: list[str] = []
    answers: dict[str, Directive] = {}
    stop_reason: str | None = None
    stop_sent: bool = False
    failure: str = ""
    failing_since: float = 0.0
    engineless_since: float = 0.0
    refused_groups: int = 0
    refused_reason: str = ""
    reload_asked: tuple[int, int] = (-1, -1)
    resumed_account: dict[str, Any] | None = None
    stepped: ConsumedReport = ConsumedReport()
    trainer_heard: tuple[str, float] | None = None
    unsaved: str = ""
    progress: tuple[Any, ...] = ()
    progressed_at: float = 0.0
    stall_told: bool = False

    def live_actors(self, now: float) -> list[ActorAlive]:
        """What each actor said last that has been heard of late."""
        return [alive for alive, heard in self.actors.values() if now - heard <= SILENT_S]

    def domain_weights_of(self, index: int) -> dict[str, float]:
        """The weights by which order `index` is drawn, however often it is issued: those of when it was first."""
        for change in reversed(self.knob_log):
            if change.cursor <= index and "domain_weights" in change.changes:
                return self._drawable(change.changes["domain_weights"])
        return self._drawable(self.first_domain_weights)

    def _drawable(self, weights: dict[str, float]) -> dict[str, float]:
        """Weights of the domains that there are: a recipe edited since may have others."""
        return {domain: weights.get(domain, 0.0) for domain in self.knobs.domain_weights}

    def checkpoint_record(self) -> dict[str, Any]:
        """What a checkpoint must carry of the controller, as plain values."""
        return {
            "epoch": self.epoch,
            "account": self.account.to_record(),
            "knobs": self.knobs.to_json(),
            "first_domain_weights": self.first_domain_weights,
            "knob_log": [msgspec.to_builtins(change) for change in self.knob_log],
            "evaluations": [msgspec.to_builtins(result) for result in self.results],
        }

    def resume(self, record: Mapping[str, Any], *, step: int) -> None:
        """Continue from a `checkpoint_record` of `step`; the trainer's own account arrives with its `TrainerReady`.

        The knobs are the recipe's, which may have been edited, but for what was changed live. Orders that are issued
        again keep the mixture by which they were drawn.

        Raises:
            RecipeError: the recipe's knobs and those changed live cannot run together.
        """
        self.epoch = int(record["epoch"])
        before, recipe = record["knobs"], self.knobs
        self.knob_log = [KnobChange(**change) for change in record["knob_log"]]
        self.first_domain_weights = record.get("first_domain_weights", self.first_domain_weights)
        self.knobs = recipe.with_live(self.knob_log)
        edited = {name: value for name, value in self.knobs.to_json().items() if value != before[name]}
        if edited:
            change = KnobChange(
                time=max((change.time for change in self.knob_log), default=0.0),
                step=step,
                cursor=int(record["account"]["cursor"]),
                who="the edited recipe",
                changes=edited,
                live=False,
            )
            self.knob_log.append(change)
        self.results = msgspec.convert(record["evaluations"], list[EvaluationResult])
        self.resumed_account = dict(record["account"])
