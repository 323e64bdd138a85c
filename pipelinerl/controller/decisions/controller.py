"""The controller: the only process of a run that makes decisions (RLAX §3.2); all other roles carry them out.

`Controller` is pure: it maps inputs to effects, without a clock and without I/O. A test can therefore replay any
schedule, and the journal (`journal.py`) can restore the controller after a crash. A directive is a message that
instructs the trainer; an order requests one group of rollouts for a prompt from the actors.

    input                      from      effects
    TrainerReady, StepDone     trainer   a Directive (publish, checkpoint, stop, knobs)
    StepSkipped                trainer   a Directive, which stops the run after three skipped steps in a row
    TrainerLeaving             trainer   a Directive to save its state and end; the run continues with a new trainer
    OrdersEnded                trainer   none directly; the updated counts of ended orders affect how many are issued
    Published, CanaryChecked   trainer   events; engines become healthy, or are lost (`engine_decisions.py`)
    Starving                   trainer   lost orders are issued again, if no actor works on any order; a Directive, if
                                         the trainer waits for an evaluation
    StreamsLost                poll      all orders and evaluation questions in flight are issued again
    GroupFailed, Evaluation…   actor     an event, or the next question or the result of an evaluation
    knobs                      API       a Directive, so that trainer and controller pace by the same knobs
    FleetMeasured              poll      an engine requested or drained (`elastic.py`)
    engine joins/leaves        API, poll a Directive that answers the trainer, if it waited for engines

After *every* input the controller also advances the evaluation, sends a Directive to publish if one is due
(`directives.publication_due`), and issues prompts within the staleness budget (`StalenessBounds.may_issue`) and
`max_groups`. Progress therefore never depends on which input arrives next.

Staleness is bounded by two knobs, and stale work is avoided before it is dropped. j bounds how far engines may fall
behind: a publication is due when an engine is j versions behind. k bounds how old a token may be when it is trained: an
order is issued only if its tokens can still be within k versions at the earliest step that may train on them. The
trainer drops groups that are older.

Each order gets exactly one outcome, such as trained or stale (`IssuedLedger`), although streams deliver at least once:
the trainer drops a second group of an order, and a repeated report receives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from pipelinerl import messages, rng
from pipelinerl.controller.decisions import collapse, elastic, engine_decisions, evaluator
from pipelinerl.controller.decisions.directives import directive, ending, publication_due, repeated
from pipelinerl.controller.decisions.giving_up import finish, give_up, progress_mark, refused, suspend, waiting_for
from pipelinerl.controller.decisions.step_review import COLLAPSE, note_outdated, note_stages, step_taken
from pipelinerl.controller.state.inputs_and_effects import (
    AnyInput,
    Effect,
    FleetMeasured,
    IssuePrompts,
    KnobsPatched,
    Record,
    ReportReceived,
    Send,
    StopAsked,
    StreamsLost,
    SuspendAsked,
    Ticked,
)
from pipelinerl.controller.state.issued_ledger import IssuedLedger, SentOrder
from pipelinerl.controller.state.knobs import KnobChange
from pipelinerl.controller.state.lag import UNPRICED, StepFigures, largest_j
from pipelinerl.controller.state.reward_history import RewardHistory
from pipelinerl.controller.state.run_state import (
    OVERSAMPLED,
    ControllerSettings,
    PublicationOrdered,
    Rewind,
    RunPhase,
    RunState,
)
from pipelinerl.enums import OnCollapse, Overdue
from pipelinerl.messages import Directive, Report
from pipelinerl.staleness import LOCKSTEP
from pipelinerl.types import DomainSampling, IssuedAt, Problem, PromptOrder, Purpose, Quota


class Controller:
    """The state of a run and the decisions on it. Methods that depend on time take `now` (seconds, monotonic)."""

    def __init__(
        self,
        settings: ControllerSettings,
        state: RunState,
        *,
        training_problem: Callable[[int, Mapping[str, float], Quota, int], Problem],
        held_out_problem: Callable[[str, int], Problem],
    ) -> None:
        """Create a controller that decides on `state`.

        Args:
            training_problem: returns the problem of a prompt order, from the order's index, the domain weights, the
                quota (block size for exact domain shares), and the number of problems that the order's domain has
                skipped because they were solved.
            held_out_problem: returns a held-out problem, from the name of its evaluation set and its index in the set.
        """
        self.settings = settings
        self.state = state
        self._training_problem = training_problem
        self._held_out_problem = held_out_problem

    def decide(self, given: AnyInput) -> list[Effect]:
        """Process one input and return its effects, in order.

        Raises RecipeError if the run cannot continue with new knobs (then nothing changes), LedgerError if the
        trainer reports more ended orders than the controller has issued.
        """
        effects = self._process(given)
        if not self.state.failing.reason:
            effects += self._evaluate(now=given.now)
            if publish_to := publication_due(self.state, self.settings, again=isinstance(given, Ticked)):
                name = f"publish-e{self.state.epoch}-{self.state.version}-m{self.state.fleet.membership}"
                effects.append(Send(self._directive(name, publish_to=publish_to)))
            effects += self.issue()
        effects += give_up(self.state, self.settings, now=given.now)
        mark, watchdog = progress_mark(self.state), self.state.watchdog
        if list(mark) != list(watchdog.mark):
            watchdog.mark, watchdog.moved_at, watchdog.reported = mark, given.now, False
        return effects

    def _process(self, given: AnyInput) -> list[Effect]:
        match given:
            case ReportReceived(report=report, now=now, queued=queued, busy=busy):
                return self.handle(report, now=now, queued=queued, busy=busy)
            case KnobsPatched(changes=changes, who=who, time=time):
                return self.patch(changes, who=who, time=time)
            case StopAsked(reason=reason):
                return self.stop(reason)
            case SuspendAsked(reason=reason, now=now):
                return suspend(self.state, self.settings, reason, now=now)
            case Ticked(now=now):
                return self.tick(now=now)
            case StreamsLost():
                return self._streams_lost()
            case FleetMeasured():
                return elastic.measured(self.state, self.settings, given)
            case _:
                expected, waits = self.settings.engines_expected, self.state.trainer.pending_ready
                effects = engine_decisions.engine_input(self.state, given, engines_expected=expected)
                return effects if waits is None else effects + self._trainer_ready(waits, now=given.now)

    # --- events ----------------------------------------------------------------------------------------------------

    def handle(
        self, report: Report, *, now: float, queued: int | None = None, busy: float | None = None
    ) -> list[Effect]:
        """Process a report; ignore reports of earlier trainers (lower epochs), and answer a repeated report again.

        For `queued` and `busy` see `ReportReceived`.
        """
        trainer = self.state.trainer
        if not isinstance(report, messages.FROM_ACTORS):
            if not isinstance(report, messages.TrainerReady) and report.epoch != self.state.epoch:
                return []
            trainer.last_report = (type(report).__name__, now)
        if isinstance(report, messages.Question) and report.report_id in trainer.answers:
            answer = trainer.answers[report.report_id]  # of unfinished publications, keep only the answer's own
            ordered = PublicationOrdered.of(answer, self.state.version)
            trainer.publications = [ordered] if answer.publish_to else []
            return [Send(repeated(answer, self.state, self.settings))]
        match report:
            case messages.TrainerReady():
                return self._trainer_ready(report, now=now)
            case messages.StepDone():
                return self._step_done(report, queued=queued, busy=busy, now=now)
            case messages.StepSkipped():
                return self._step_skipped(report)
            case messages.OrdersEnded():
                self.state.account.update(report.consumed)
                self.state.account.lost(report.again)
                return []
            case messages.Starving():
                return self._starving(report, now=now)
            case messages.Published():
                return self._published(report)
            case messages.CanaryChecked():
                return engine_decisions.canary_checked(self.state, report, now=now)
            case messages.Checkpointed() | messages.CheckpointDelayed():
                return self._checkpointed(report)
            case messages.TrainerLeaving():  # its successor resumes from the state that it saves now
                self.state.account.update(report.consumed)
                return [self._answer(report.report_id, publish_to=[], leave=True)]
            case messages.TrainerStopped():
                if report.left and self.ending is None:
                    return [Record("trainer_left", {"model_version": report.model_version})]
                self.state.phase = RunPhase.FINISHING
                return [] if self.state.failing.reason else evaluator.want_last(self.state, self.settings)
            case messages.GroupFailed():
                return self._group_failed(report, now=now)
            case messages.GroupOutdated():
                self.state.account.fail(report.index, report.issued_at, is_stale=True)
                note_outdated(self.state, report)
                fields = {"order_id": report.order_id, "oldest": report.oldest, "current": report.current}
                return [Record("group_outdated", fields), *self._ended(report.index)]
            case messages.GroupHandedOver():
                tokens = {"tokens_kept": report.tokens_kept, "tokens_resampled": report.tokens_resampled}
                return [Record("group_handed_over", {"order_id": report.order_id} | tokens)]
            case messages.EvaluationDone():
                return self._question_ended(report, now=now)
            case messages.ActorAlive():
                self.state.actors[report.name] = (msgspec.structs.replace(report, stages=[]), now)
                note_stages(self.state, report)
                return []

    def patch(self, changes: Mapping[str, Any], *, who: str, time: float) -> list[Effect]:
        """Change knobs and send them to the trainer. If a value is unusable, change nothing and raise RecipeError."""
        state = self.state
        before, state.knobs = state.knobs.to_json(), state.knobs.patched(changes)
        after = state.knobs.to_json()
        changed = {name: value for name, value in after.items() if name in changes or value != before[name]}
        state.knob_log.append(
            KnobChange(time=time, step=state.version, cursor=state.account.cursor, who=who, changes=changed)
        )
        if {"domain_weights", "temperature"} & changed.keys():  # other rewards than before are no collapse
            state.watched.rewards = RewardHistory()
        event = Record("knobs", {"changes": changed, "who": who, "step": state.version})
        return [event, *self._unsolicited(f"knobs-e{state.epoch}-{len(state.knob_log)}")]

    def stop(self, reason: str) -> list[Effect]:
        """End the run at the next step boundary, with a last publication, checkpoint and evaluation."""
        if self.state.stop_reason is None:
            self.state.stop_reason = reason
        if self.state.phase in (RunPhase.STARTING, RunPhase.FINISHED) or self.state.trainer.stop_sent:
            return []
        return [Send(self._directive(f"stop-e{self.state.epoch}"))]

    def tick(self, *, now: float) -> list[Effect]:
        """React to the passing of time: expel engines whose drain is overdue, and record each stall once."""
        effects = engine_decisions.overdue(self.state, now=now)
        watchdog = self.state.watchdog
        still_s = now - watchdog.moved_at if watchdog.mark else 0.0
        is_stalled = still_s > self.settings.run.stall_s and self.state.phase is not RunPhase.FINISHED
        if is_stalled and not watchdog.reported:
            watchdog.reported = True
            effects.append(Record("stalled", {"still_s": still_s, "waits_for": waiting_for(self.state, now=now)}))
        return effects

    # --- decisions -------------------------------------------------------------------------------------------------

    @property
    def ending(self) -> str | None:
        """The reason why the run ends at the next step boundary; None while it continues."""
        return ending(self.state, self.settings)

    def issue(self) -> list[Effect]:
        """Issue prompt orders as long as their groups can be fresh enough (k) for their earliest step (RLAX §3.1)."""
        loaded = self.state.fleet.oldest_loaded()
        if self.state.phase is not RunPhase.TRAINING or loaded is None or evaluator.comes_first(self.state):
            return []
        orders: list[PromptOrder] = []
        self.state.follow(loaded)
        # Count the orders in flight once and then update the counts: there may be thousands of orders in flight, and
        # one call may issue thousands more.
        account, group_size = self.state.account, self.state.knobs.max_group_size
        out, rollouts = account.in_flight, account.rollouts_in_flight(group_size)
        while out < self.settings.max_groups and self.state.bounds.may_issue(
            current=self.state.version,
            loaded=loaded,
            queued=self._expected_rollouts(out, rollouts),
            per_step=self.state.knobs.rollouts_per_step,
            sampled_at_once=self._sampled_at_once,
            ahead=self._ahead,
        ):
            order = self._training_order(account.next_index())
            account.sent[order.index] = SentOrder(order.sampling.num_samples, order.issued_at)
            out, rollouts = out + 1, rollouts + order.sampling.num_samples
            orders.append(order)
        if not orders:
            return []
        # With Overdue.WAIT, the trainer must know of a prompt order before any actor works on it.
        name, waits = f"issued-e{self.state.epoch}-{orders[-1].index}", self.settings.overdue is Overdue.WAIT
        return [*(self._unsolicited(name) if waits else []), IssuePrompts(orders)]

    def _training_order(self, index: int) -> PromptOrder:
        """Return order `index`, for the mixture's next problem that is not resting.

        It depends only on the index, the run's seed, its state and the knobs. A domain's own group size, temperature,
        length and stop strings override those of the run and the knob `temperature`.
        """
        state, settings = self.state, self.settings
        weights, quota = state.domain_weights_of(index), state.quota_of(index)
        problem = state.cooldown.choose(
            index,
            lambda ahead: self._training_problem(index, weights, quota, ahead),
            version=state.version,
            frontier=state.account.consumed.frontier,
        )
        own = settings.by_domain.get(problem.domain, DomainSampling())
        return PromptOrder(
            order_id=f"prompt-{index:06d}",
            index=index,
            purpose=Purpose.TRAINING,
            problem=problem,
            sampling=own.of(replace(settings.sampling, temperature=state.knobs.temperature)),
            seed=rng.key(settings.run.seed, "sampling", index),
            chat_template_kwargs=own.chat_template_kwargs,
            issued_at=IssuedAt(state.epoch, state.version),
        )

    def _expected_rollouts(self, out: int, rollouts: int) -> int:
        """Estimate how many of the `rollouts` in flight (from `out` prompt orders) will be trained and not filtered."""
        knobs, most = self.state.knobs, self.settings.oversample
        if most is None:
            most = OVERSAMPLED if knobs.k > (knobs.j or 1) and self._ahead > 1 else 1.0
        waiting = int(self.state.trainer.last_step.get("waiting_groups", 0))
        groups = self.state.filtered_share.expected(out, waiting=waiting, most=most)
        return rollouts * groups // out if out else 0

    @property
    def _ahead(self) -> float:
        """The number of steps whose rollouts are to be in flight; 1 on policy."""
        lag = self.state.lag
        if self.state.knobs.j is not None:
            return lag.steps
        return 1.0 if self._is_unpriced else lag.ahead

    def _note_lag(self, figures: Mapping[str, float], *, queued: int | None, busy: float | None) -> None:
        """Adapt the lag (`LagRule`) after a training step.

        The rule ignores each step during which an evaluation takes engines, since it makes the trainer wait, or an
        engine joins, and the step after.
        """
        state, knobs, lag = self.state, self.state.knobs, self.state.lag
        if self._is_unpriced:
            return
        if state.evaluations.current is not None or state.fleet.without_weights():
            lag.pause()
            return
        per_step, step_s = knobs.rollouts_per_step, max(figures.get("step_s", 0.0), 1e-9)
        most = state.bounds.most_in_flight(
            current=0, loaded=0, per_step=per_step, sampled_at_once=self._sampled_at_once
        )
        step = StepFigures(
            waited=figures.get("wait_s", 0.0) / step_s,
            held=figures.get("publish_wait_s", 0.0) / step_s,
            left_over=int(figures.get("waiting_groups", 0)) * knobs.max_group_size / per_step,
            queued=None if queued is None else queued / per_step,
            ess=None if self.settings.lag_loss is None else figures.get("ess"),
            age=figures.get("staleness_mean"),
            lag_rms=figures.get("lag_rms"),
            seconds=figures.get("wait_s", 0.0) + step_s,
            busy=busy if knobs.j is None else None,
            sampling=max((each.verified - each.claimed for each in state.watched.stages), default=0.0) / step_s,
        )
        most_j = largest_j(knobs.k) if knobs.j is None else 1
        lag.note_step(step, most=most / per_step, most_j=most_j, loss=self.settings.lag_loss or 0.0)

    def lag_sentence(self) -> str:
        """Return a sentence for users on the lag that the run holds, and why; empty before the first steps."""
        if self._is_unpriced:
            return f"lag 1, {UNPRICED}"
        return self.state.lag.why(j=self.state.knobs.j, is_priced=self.settings.lag_loss is not None)

    @property
    def _is_unpriced(self) -> bool:
        """True if the run is on policy because nothing in the objective corrects for lag, and the user sets no j."""
        return self.state.knobs.j is None and self.settings.lag_loss is None

    @property
    def _sampled_at_once(self) -> int:
        """The number of rollouts that the actors work on at once."""
        knobs = self.state.knobs
        return knobs.groups_in_flight * max(1, len(self.state.actors)) * knobs.max_group_size

    # --- details ---------------------------------------------------------------------------------------------------

    def _trainer_ready(self, report: messages.TrainerReady, *, now: float) -> list[Effect]:
        state, trainer = self.state, self.state.trainer
        if report.report_id in trainer.begun:
            return []  # a repeated report of an earlier trainer, whose epoch is over
        trainer.awaited = engine_decisions.awaited(state, engines_expected=self.settings.engines_expected)
        if trainer.awaited and state.phase is RunPhase.STARTING:
            trainer.pending_ready = report
            return []
        trainer.pending_ready = None
        trainer.begun = [*trainer.begun, report.report_id]
        state.epoch = max(state.epoch, report.claimed) + 1
        state.version = report.model_version
        trainer.stop_sent = False
        state.watched.rewards.forget_after(state.version)
        has_rewound = state.rewind.to is not None and state.version <= state.rewind.to
        state.rewind.to = None if has_rewound else state.rewind.to
        state.fleet.begin_epoch()
        state.loaded_from = []
        if state.resumed_account is not None:
            state.account = IssuedLedger.resume(state.resumed_account, report.consumed)
            state.resumed_account = None
        state.account.update(report.consumed)
        if state.knobs.k == LOCKSTEP:
            state.account.withdraw(report.model_version)
        trainer.stepped = report.consumed
        state.cooldown.note(report.solved, self.settings.cooldown, version=state.version)
        # A trainer that joins a FINISHING run sets it back to TRAINING; the last evaluation begins again when it stops.
        if state.phase is not RunPhase.FINISHED:
            state.phase = RunPhase.TRAINING
        if state.evaluations.due is not None and state.evaluations.due.version > state.version:
            state.evaluations.due = None  # its weights are lost, and their step makes it due again
        if state.version == 0 and not state.evaluations.results:
            evaluator.want(state, self.settings.evaluation.sets)
        trainer.first_version = state.version
        trainer.training_since = now
        trainer.publications = []
        state.lag.any_trained = False
        return [
            Record("trainer_ready", {"epoch": state.epoch, "model_version": state.version}),
            # The checkpoint does not know yet that the run has returned to it: save it again.
            self._answer(report.report_id, publish_to=sorted(state.fleet.members()), saves=has_rewound),
        ]

    def _step_done(
        self, report: messages.StepDone, *, queued: int | None, busy: float | None, now: float
    ) -> list[Effect]:
        self.state.version = report.model_version
        self.state.trainer.note_step(report.model_version)
        self.state.account.update(report.consumed)
        before, self.state.trainer.stepped = self.state.trainer.stepped, report.consumed
        self.state.filtered_share.note_step(
            trained=report.consumed.trained - before.trained, filtered=report.consumed.filtered - before.filtered
        )
        self.state.trainer.last_step = report.stats
        self._note_lag(report.stats, queued=queued, busy=busy)
        self.state.cooldown.note(report.solved, self.settings.cooldown, version=self.state.version)
        self.state.failing.refused_groups = self.state.failing.too_long_groups = 0
        effects = step_taken(self.state, report, lag=self.lag_sentence(), now=now) + collapse.guard(self.state, now=now)
        if self.state.rewind.to is not None and report.model_version > self.state.rewind.decided_at:
            self.state.rewind.to = None
            effects.append(Record("rewind_failed", {"step": self.state.version, "reason": "no checkpoint is older"}))
        elif self.ending is None and COLLAPSE in self.state.watched.alarms and not self.state.rewind.done:
            effects += self._rewind() if self.settings.run.on_collapse is OnCollapse.REWIND else []
        if self.settings.elastic is not None:
            elastic.note_step(self.state.elastic, report.stats, self.state.watched.by_domain)
        if self.ending is None:
            version, common = self.state.version, self.state.knobs.evaluation_interval_steps
            sets = self.settings.evaluation.sets
            evaluator.want(self.state, [each for each in sets if version % (each.interval_steps or common) == 0])
        if self.settings.overdue is Overdue.WAIT:  # issue orders before answering, since the answer must list them
            effects += self.issue()
        return [*effects, self._answer(report.report_id, publish_to=publication_due(self.state, self.settings))]

    def _rewind(self) -> list[Effect]:
        """Order the trainer to return to a good checkpoint, with half the learning rate."""
        state = self.state
        state.rewind = Rewind(done=True, to=state.good_version, decided_at=state.version)
        reason = f"returns from version {state.version} to the newest checkpoint up to version {state.rewind.to}"
        event = Record("rewind", {"step": state.version, "to": state.rewind.to, "reason": reason})
        time = max((change.time for change in state.knob_log), default=0.0)
        changes = {"learning_rate": state.knobs.learning_rate / 2}
        return [event, *self.patch(changes, who="the collapse guard", time=time)]

    def _step_skipped(self, report: messages.StepSkipped) -> list[Effect]:
        self.state.account.update(report.consumed)
        step = self.state.version + 1
        if report.in_a_row >= messages.SKIPS_THAT_END and self.state.stop_reason is None:
            self.state.stop_reason = f"step {step} was skipped {report.in_a_row} times in a row: {report.what}"
        fields = {"step": step, "what": report.what, "groups": report.groups, "in_a_row": report.in_a_row}
        skipped = Record("step_skipped", fields)
        return [skipped, self._answer(report.report_id, publish_to=publication_due(self.state, self.settings))]

    def _published(self, report: messages.Published) -> list[Effect]:
        self.state.trainer.note_published(report)
        publication = {
            "model_version": report.model_version,
            "send_s": report.send_s,
            "total_s": report.total_s,
            "pause_s": max(report.pauses_s.values(), default=0.0),
            "pauses_s": report.pauses_s,
            "engines": len(report.pauses_s),
            "failed": report.failed,
            **({"error": report.error} if report.error else {}),
        }
        return [Record("publish", publication), *engine_decisions.published(self.state, report)]

    def _checkpointed(self, report: messages.Checkpointed | messages.CheckpointDelayed) -> list[Effect]:
        """Record a checkpoint. If reports repeat that a checkpoint is delayed, record only the first of them."""
        trainer, version = self.state.trainer, report.model_version
        if isinstance(report, messages.Checkpointed):
            trainer.unsaved = ""
            fields = {"path": report.path, "model_version": version, "stall_s": report.stall_s}
            return [Record("checkpoint", fields)]
        is_new = not trainer.unsaved
        trainer.unsaved = f"the checkpoint of step {version} cannot be written yet: {report.reason}"
        return [Record("checkpoint_delayed", {"model_version": version, "reason": report.reason})] if is_new else []

    def _starving(self, report: messages.Starving, *, now: float) -> list[Effect]:
        """If the trainer waits for rollouts and no actor works on any order, treat the orders as lost: reissue them."""
        # Orders are lost when the stream server dies with its newest second of data. If the trainer waits because of an
        # evaluation, send a directive as a sign of life instead: the evaluation's time limits bound that wait.
        evaluates = self.state.evaluations.current is not None
        if evaluates and (evaluator.comes_first(self.state) or evaluator.holds_updates(self.state)):
            return self._unsolicited(f"held-e{self.state.epoch}-{self.state.version}")
        actors = self.state.live_actors(now)
        idle = actors and not any(alive.groups_in_flight for alive in actors)
        if self.state.evaluations.current is not None or not idle or not self.state.fleet.verified():
            return []
        lost = self.state.account.lost(set(range(self.state.account.cursor)) - set(report.held))
        return [Record("orders_lost", {"orders": len(lost)})] if lost else []

    def _streams_lost(self) -> list[Effect]:
        """After stream data was lost, reissue unfinished orders and evaluation questions; send a new directive."""
        # Duplicates do no harm: the trainer drops a second group of an order, and the evaluation a second answer.
        self.state.trainer.publications = []
        account, evaluation = self.state.account, self.state.evaluations.current
        effects = self._unsolicited(f"streams-lost-e{self.state.epoch}-{self.state.version}")
        if evaluation is not None:
            out = [index for index in range(evaluation.next_index) if index not in evaluation.answers]
            effects += evaluator.questions(self.settings, evaluation, out, self._held_out_problem)
        training = self.state.phase is RunPhase.TRAINING
        if training and (lost := account.lost(range(account.consumed.frontier, account.cursor))):
            effects.append(Record("orders_lost", {"orders": len(lost)}))
        return effects

    def _group_failed(self, report: messages.GroupFailed, *, now: float) -> list[Effect]:
        if report.purpose == Purpose.EVALUATION:
            return self._question_ended(report, now=now)
        self.state.account.fail(report.index, report.issued_at)
        refused(self.state, report)
        failed = Record("group_failed", {"order_id": report.order_id, "reason": report.reason})
        return [failed, *self._ended(report.index)]

    def _question_ended(self, report: messages.EvaluationDone | messages.GroupFailed, *, now: float) -> list[Effect]:
        """Record the answer to a question of the evaluation, or its failure; issue the question again if needed."""
        evaluation = self.state.evaluations.current
        answer = report if isinstance(report, messages.EvaluationDone) else None
        if evaluation is None or not evaluation.concerns(report.order_id):
            return []
        again = [report.index] if evaluation.add(report.index, answer, now=now) else []
        return evaluator.questions(self.settings, evaluation, again, self._held_out_problem)

    def _ended(self, index: int) -> list[Effect]:
        """With `Overdue.WAIT`, notify the trainer that order `index` ended without a group, so it need not wait."""
        return [] if self.settings.overdue is Overdue.DROP else self._unsolicited(f"ended-e{self.state.epoch}-{index}")

    def _evaluate(self, *, now: float) -> list[Effect]:
        effects = evaluator.advance(self.state, self.settings, self._held_out_problem, now=now)
        results = evaluator.closed(self.state, self.settings)
        if not results:
            # If no evaluation runs, none has begun: no engine is left, or there are no held-out problems.
            is_over = self.state.phase is RunPhase.FINISHING and self.state.evaluations.current is None
            return effects + ([finish(self.state, self.settings)] if is_over else [])
        if not self.state.evaluations.results:
            self.state.trainer.training_since = now
        self.state.lag.pause()
        for result in results:
            self.state.evaluations.add(result)
        effects += [Record("evaluation", msgspec.to_builtins(result)) for result in results]
        if self.state.phase is RunPhase.FINISHING:
            return [*effects, finish(self.state, self.settings)]
        target, reached = self.settings.run.until_accuracy, results[0].at_least if results[0].place == 0 else None
        if target is not None and reached is not None and reached >= target:
            of = f" of {results[0].name}" if len(self.settings.evaluation.sets) > 1 else ""
            effects += self.stop(f"held-out accuracy {reached:.3f}{of} has reached {target:g}")
        return effects

    def _answer(self, report_id: str, *, publish_to: list[str], leave: bool = False, saves: bool = False) -> Send:
        """Answer a report with a directive. Only the newest answer is kept: the trainer awaits one at a time."""
        directive = self._directive(report_id, publish_to=publish_to, leave=leave, saves=saves)
        self.state.trainer.answers = {report_id: directive}
        return Send(directive)

    def _unsolicited(self, name: str) -> list[Effect]:
        """Send a directive called `name` that answers no report, unless the run is stopping or not yet training."""
        if self.state.phase is not RunPhase.TRAINING or self.ending is not None:
            return []
        return [Send(self._directive(name))]

    def _directive(
        self, name: str, *, publish_to: Sequence[str] = (), leave: bool = False, saves: bool = False
    ) -> Directive:
        made = directive(self.state, self.settings, answers=name, publish_to=publish_to, leave=leave, saves=saves)
        if made.publish_to:
            self.state.trainer.publications.append(PublicationOrdered.of(made, self.state.version))
        self.state.trainer.stop_sent = self.state.trainer.stop_sent or made.stop
        return made
