"""The controller: the only active entity of a run (RLAX §3.2). It decides; every other role acts on its orders.

`Controller` is pure: events in, effects out, no clock, no I/O, so that a test can replay any schedule.

    event                      from      effects
    TrainerReady, StepDone     trainer   a Directive (publish, checkpoint, stop, knobs), then prompts
    Progress, Published        trainer   prompts
    Starving                   trainer   the lost orders again, if no actor works on any
    GroupFailed, Evaluation…   actor     prompts; an evaluation's result
    patch, engine joins/dies   API       a Directive when the trainer must publish without waiting for a step

What it waits for, and who unblocks it: `waiting_for` says so in words. Prompts are issued within the staleness budget
(`StalenessBounds.may_issue`) and within `max_groups`; an evaluation before the first step runs alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, final

import msgspec

from pipelinerl.controller.account import Account
from pipelinerl.controller.effects import Effect, Finish, IssuePrompts, Record, Send
from pipelinerl.controller.evaluation import Evaluation, EvaluationResult
from pipelinerl.controller.fleet import Fleet
from pipelinerl.controller.knobs import KnobChange, Knobs
from pipelinerl.controller.order_book import OrderBook
from pipelinerl.messages import (
    ActorAlive,
    Checkpointed,
    Directive,
    EvaluationDone,
    GroupFailed,
    Progress,
    Published,
    Report,
    Starving,
    StepDone,
    TrainerKnobs,
    TrainerReady,
    TrainerStopped,
)
from pipelinerl.types import Problem, PromptOrder, Purpose, Sampling


class Phase(StrEnum):
    """Where the run stands."""

    STARTING = "starting"
    TRAINING = "training"
    FINISHING = "finishing"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What a run fixes for good; what may change while it is live is in `Knobs`."""

    seed: int
    steps: int
    until_accuracy: float | None
    max_groups: int
    sampling: Sampling
    evaluation_problems: int
    evaluation_max_tokens: int
    evaluation_patience_s: float = 120.0
    """An evaluation that gets no answer for so long ends with those it has."""
    checkpoint_interval_steps: int
    engines_expected: int


@final
class Controller:
    """State of a run and the decisions taken on it. Methods take `now` (seconds, monotonic) where time matters."""

    def __init__(
        self,
        settings: ControllerSettings,
        knobs: Knobs,
        *,
        training_problem: Callable[[int], Problem],
        held_out_problem: Callable[[int], Problem],
        fleet: Fleet | None = None,
    ) -> None:
        self.settings = settings
        self.knobs = knobs
        self.knob_log: list[KnobChange] = []
        self.fleet = fleet or Fleet()
        self.account = Account()
        self.phase = Phase.STARTING
        self.epoch = 0
        self.version = 0
        self.evaluation: Evaluation | None = None
        self.results: list[EvaluationResult] = []
        self.last_step: dict[str, float] = {}
        self.last_publish: Published | None = None
        self.actors: dict[str, tuple[ActorAlive, float]] = {}
        self.training_since = 0.0
        self.first_version = 0
        self._orders = OrderBook(
            seed=settings.seed,
            sampling=settings.sampling,
            evaluation_max_tokens=settings.evaluation_max_tokens,
            training_problem=training_problem,
            held_out_problem=held_out_problem,
        )
        self._incarnation = ""
        self._pending_ready: TrainerReady | None = None
        self._answers: dict[str, Directive] = {}
        self._stop_reason: str | None = None
        self._stop_sent = False
        self._reload_asked = (-1, -1)
        self._resumed_account: dict[str, Any] | None = None

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(self, report: Report, *, now: float) -> list[Effect]:
        """Take one report and return what is to be done, in order."""
        match report:
            case TrainerReady():
                return self._trainer_ready(report, now=now)
            case StepDone() if report.epoch == self.epoch:
                return self._step_done(report, now=now)
            case Progress() if report.epoch == self.epoch:
                self.account.update(report.consumed)
                self.account.lost(report.again)
                return self.issue()
            case Starving() if report.epoch == self.epoch:
                return self._starving(report)
            case Published() if report.epoch == self.epoch:
                return self._published(report, now=now)
            case Checkpointed():
                return [Record("checkpoint", {"path": report.path, "model_version": report.model_version})]
            case TrainerStopped() if report.epoch == self.epoch:
                return self._trainer_stopped(now=now)
            case GroupFailed():
                return self._group_failed(report, now=now)
            case EvaluationDone():
                return self._evaluated(report.order_id, report.index, report, now=now)
            case ActorAlive():
                self.actors[report.name] = (report, now)
                return []
            case _:
                return []  # of an abandoned epoch: its author is fenced

    def patch(self, changes: Mapping[str, Any], *, who: str, time: float) -> list[Effect]:
        """Change knobs; they reach the trainer with its next directive. Raises RecipeError and changes nothing."""
        before, self.knobs = self.knobs.to_json(), self.knobs.patched(changes)
        changed = {
            name: value for name, value in self.knobs.to_json().items() if name in changes or value != before[name]
        }
        self.knob_log.append(KnobChange(time=time, step=self.version, who=who, changes=changed))
        return [Record("knobs", {"changes": changed, "who": who, "step": self.version}), *self.issue()]

    def engine_joined(self, url: str, *, now: float, incarnation: str = "") -> list[Effect]:
        """An engine offers itself; without `incarnation`, an operator offers it."""
        if not self.fleet.join(url, incarnation):
            return []
        effects: list[Effect] = [Record("engine_joined", {"url": url})]
        if self._pending_ready is not None:
            return effects + self._trainer_ready(self._pending_ready, now=now)
        return effects + self.reload_if_due()

    def engine_returned(self, url: str) -> list[Effect]:
        """An engine that was lost answers again."""
        return [Record("engine_joined", {"url": url}), *self.reload_if_due()]

    def engine_left(self, url: str, reason: str) -> list[Effect]:
        """An engine was removed, or died."""
        return [Record("engine_lost", {"url": url, "reason": reason})]

    def stop(self, reason: str) -> list[Effect]:
        """End the run at the next step boundary: last publication, checkpoint and evaluation included."""
        if self._stop_reason is None:
            self._stop_reason = reason
        if self.phase is Phase.STARTING or self._stop_sent:
            return []
        return [Send(self._directive(f"stop-e{self.epoch}", publish=True))]

    def tick(self, *, now: float) -> list[Effect]:
        """Time has passed: publish to engines that wait for weights, and give up on answers that do not come."""
        effects = self.reload_if_due()
        evaluation = self.evaluation
        if evaluation is not None and now - evaluation.heard_at > self.settings.evaluation_patience_s:
            effects += self._close_evaluation(evaluation, now=now)
        return effects

    # --- decisions -------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> str | None:
        """Why the run ends at the next step boundary; None while it goes on."""
        if self._stop_reason is None and self.version >= self.settings.steps and self.phase is not Phase.STARTING:
            return f"all {self.settings.steps} steps are done"
        return self._stop_reason

    def reload_if_due(self) -> list[Effect]:
        """Ask the trainer to publish between steps when an engine waits for weights; once for each membership."""
        key = (self.epoch, self.fleet.membership)
        if self.phase is Phase.STARTING or key == self._reload_asked or not self.fleet.awaits_weights():
            return []
        self._reload_asked = key
        return [Send(self._directive(f"reload-e{self.epoch}-{self.version}-m{key[1]}", publish=True))]

    def issue(self) -> list[Effect]:
        """Prompt orders that can still be fresh at their earliest step (RLAX §4.2; pacing before dropping)."""
        loaded = self.fleet.oldest_loaded()
        if self.phase is not Phase.TRAINING or loaded is None or (self.evaluation is not None and self.version == 0):
            return []
        orders: list[PromptOrder] = []
        while self.account.in_flight < self.settings.max_groups and self.knobs.bounds.may_issue(
            current=self.version,
            loaded=loaded,
            queued_groups=self.account.in_flight,
            groups_per_step=self.knobs.groups_per_step,
        ):
            orders.append(self._orders.training(self.account.next_index(), temperature=self.knobs.temperature))
        return [IssuePrompts(orders)] if orders else []

    def waiting_for(self, *, now: float) -> str:
        """In words: what the run waits for, and who would unblock it."""
        if self.phase is Phase.FINISHED:
            return "nothing: the run is over"
        if not self.fleet.members():
            return "an engine to join"
        if self.phase is Phase.STARTING:
            return "the trainer to be ready"
        if not self.fleet.serving():
            return "the trainer to publish its weights to an engine"
        if self.evaluation is not None and self.version == 0:
            return f"{self.evaluation.problems - len(self.evaluation.answers)} answers of the first evaluation"
        if not self.actors:
            return "an actor to report"
        name, (_, heard) = max(self.actors.items(), key=lambda item: now - item[1][1])
        late = f"; actor {name} last heard {now - heard:.0f} s ago" if now - heard > 10 else ""
        return f"step {self.version + 1}: {self.account.in_flight} groups in flight{late}"

    # --- snapshot --------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        """Everything that a checkpoint must carry of the controller, as plain values."""
        return {
            "epoch": self.epoch,
            "account": self.account.to_record(),
            "knobs": self.knobs.to_json(),
            "knob_log": [msgspec.to_builtins(change) for change in self.knob_log],
            "evaluations": [msgspec.to_builtins(result) for result in self.results],
        }

    def restore(self, snapshot: Mapping[str, Any]) -> None:
        """Continue from a snapshot; the trainer's own account arrives with its `TrainerReady`."""
        self.epoch = int(snapshot["epoch"])
        self.knobs = self.knobs.patched(snapshot["knobs"])
        self.knob_log = [KnobChange(**change) for change in snapshot["knob_log"]]
        self.results = [EvaluationResult(**result) for result in snapshot["evaluations"]]
        self._resumed_account = dict(snapshot["account"])

    # --- details ---------------------------------------------------------------------------------------------------

    def _trainer_ready(self, report: TrainerReady, *, now: float) -> list[Effect]:
        if report.report_id in self._answers:
            return [Send(self._answers[report.report_id])]
        if len(self.fleet.members()) < self.settings.engines_expected and self.phase is Phase.STARTING:
            self._pending_ready = report
            return []
        self._pending_ready = None
        self.epoch += 1
        self.version = report.model_version
        self._incarnation = report.incarnation
        self._stop_sent = False
        self.fleet.begin_epoch()
        if self._resumed_account is not None:
            self.account = Account.resume(self._resumed_account, report.consumed)
            self._resumed_account = None
        self.account.update(report.consumed)
        effects: list[Effect] = [Record("trainer_ready", {"epoch": self.epoch, "model_version": self.version})]
        if self.phase is Phase.STARTING:
            self.phase = Phase.TRAINING
        self.first_version = self.version
        self.training_since = now
        self._reload_asked = (self.epoch, self.fleet.membership)
        return [*effects, self._answer(report.report_id, publish=True)]

    def _step_done(self, report: StepDone, *, now: float) -> list[Effect]:
        if report.report_id in self._answers:
            return [Send(self._answers[report.report_id])]
        self.version = report.model_version
        self.account.update(report.consumed)
        self.last_step = report.stats
        effects: list[Effect] = [Record("step", {"step": self.version, "model_version": self.version, **report.stats})]
        loaded = self.fleet.oldest_loaded()
        due = loaded is None or self.knobs.bounds.reload_due(current=self.version, loaded=loaded)
        effects.append(self._answer(report.report_id, publish=due or self.fleet.awaits_weights()))
        if self.ending is None and self.version % self.knobs.evaluation_interval_steps == 0:
            effects += self._evaluate(now=now)
        return effects + self.issue()

    def _published(self, report: Published, *, now: float) -> list[Effect]:
        for url in report.pauses_s:
            self.fleet.published(url, report.model_version)
        lost = [item for item in report.failed.items() if self.fleet.publish_failed(*item)]
        self.last_publish = report
        record = Record(
            "publish",
            {
                "model_version": report.model_version,
                "send_s": report.send_s,
                "total_s": report.total_s,
                "pause_s": max(report.pauses_s.values(), default=0.0),
                "engines": len(report.pauses_s),
                "failed": report.failed,
            },
        )
        effects: list[Effect] = [record, *(effect for item in lost for effect in self.engine_left(*item))]
        first = self.version == 0 and not self.results and self.evaluation is None
        if first and self.ending is None and report.pauses_s:
            effects += self._evaluate(now=now)
        return effects + self.reload_if_due() + self.issue()

    def _starving(self, report: Starving) -> list[Effect]:
        """Orders that no actor works on while the trainer waits for them went with the stream server's last second."""
        idle = self.actors and not any(alive.groups_in_flight for alive, _ in self.actors.values())
        if self.evaluation is not None or not idle or not self.fleet.serving():
            return []
        lost = self.account.lost(set(range(self.account.cursor)) - set(report.held))
        return [Record("orders_lost", {"orders": len(lost)}), *self.issue()] if lost else []

    def _trainer_stopped(self, *, now: float) -> list[Effect]:
        self.phase = Phase.FINISHING
        self.evaluation = None
        return self._evaluate(now=now) or self._finish()

    def _group_failed(self, report: GroupFailed, *, now: float) -> list[Effect]:
        if report.purpose == Purpose.EVALUATION:
            return self._evaluated(report.order_id, report.index, None, now=now)
        self.account.fail(report.index)
        failed = Record("group_failed", {"order_id": report.order_id, "reason": report.reason})
        return [failed, *self.issue()]

    def _evaluate(self, *, now: float) -> list[Effect]:
        if self.evaluation is not None or self.settings.evaluation_problems == 0 or not self.fleet.serving():
            return []
        self.evaluation = Evaluation(self.version, self.settings.evaluation_problems, now)
        orders = [self._orders.evaluation(i, version=self.version) for i in range(self.settings.evaluation_problems)]
        return [IssuePrompts(orders)]

    def _evaluated(self, order_id: str, index: int, answer: EvaluationDone | None, *, now: float) -> list[Effect]:
        evaluation = self.evaluation
        if evaluation is None or not order_id.startswith(f"eval-{evaluation.model_version}-"):
            return []
        evaluation.add(index, answer, now=now)
        return self._close_evaluation(evaluation, now=now) if evaluation.complete else []

    def _close_evaluation(self, evaluation: Evaluation, *, now: float) -> list[Effect]:
        self.evaluation = None
        if not self.results:
            self.training_since = now
        result = evaluation.result()
        self.results.append(result)
        effects: list[Effect] = [Record("evaluation", msgspec.to_builtins(result))]
        if self.phase is Phase.FINISHING:
            return effects + self._finish()
        target = self.settings.until_accuracy
        if target is not None and result.accuracy >= target:
            effects += self.stop(f"held-out accuracy {result.accuracy:.3f} has reached {target:g}")
        return effects + self.issue()

    def _finish(self) -> list[Effect]:
        self.phase = Phase.FINISHED
        return [Finish(self.ending or "stopped")]

    def _answer(self, report_id: str, *, publish: bool) -> Send:
        """The directive that a report asks for; the last is kept, since the trainer asks one question at a time."""
        directive = self._directive(report_id, publish=publish)
        self._answers = {report_id: directive}
        return Send(directive)

    def _directive(self, answers: str, *, publish: bool) -> Directive:
        stop = self.ending is not None
        self._stop_sent = self._stop_sent or stop
        stepped = answers.startswith(f"e{self.epoch}-step-")
        checkpoint = stop or (stepped and self.version % self.settings.checkpoint_interval_steps == 0)
        return Directive(
            answers=answers,
            epoch=self.epoch,
            knobs=TrainerKnobs(
                k=self.knobs.k,
                learning_rate=self.knobs.learning_rate,
                rollouts_per_step=self.knobs.rollouts_per_step,
            ),
            publish_to=self.fleet.members() if publish or stop else [],
            membership=self.fleet.membership,
            failed=self.account.unsettled,
            checkpoint=checkpoint,
            stop=stop,
            controller_state=self.snapshot() if checkpoint else None,
        )
