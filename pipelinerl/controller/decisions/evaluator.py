"""`Evaluator`: pure rules for when held-out problems are evaluated, with which weights, and when an evaluation ends.

    due ──weights of the due version or newer are served──▶ running ──all problems ended, or gave up──▶ a result
     ▲                                                         │
     └── pin broken: the engine was lost or updated ───────────┘   at most `restarts` times

Training continues during an evaluation, which is pinned to one version of the weights. With pin mode `engine`, one
engine keeps its weights and answers, while the other engines continue to be updated; this engine's share of the actors'
capacity limits how many questions are in flight. With pin mode `gate`, weight updates are postponed until the
evaluation ends, for at most `hold_s` seconds; meanwhile prompts are issued as long as their groups can be fresh enough
to train (k). Before the first step and after the last step there are no updates to postpone: all engines answer, and
versions are still checked. Sets that are due together form one evaluation, answered by the same weights; sets that
become due during an evaluation wait for its end.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pipelinerl import rng
from pipelinerl.controller.decisions.prompt_orders import PromptOrderFactory
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationDue, EvaluationPlan, EvaluationResult
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import Effect, IssuePrompts, Record
from pipelinerl.controller.state.run_state import RunPhase, RunState
from pipelinerl.enums import Pin
from pipelinerl.messages import EvaluationDone

#: An evaluation leaves a pinned engine that has been suspect for longer than this; a dead one it leaves at once.
_SUSPECT_S: Final = 5.0


class Evaluator:
    """Decides when evaluations begin, restart and end. Changes the run's state, and may pin an engine of the fleet."""

    def __init__(self, plan: EvaluationPlan, orders: PromptOrderFactory) -> None:
        self.plan = plan
        self._orders = orders

    def want(self, state: RunState) -> None:
        """Mark an evaluation of all held-out sets with the current weights as due."""
        self._want(state, [each.name for each in self.plan.sets])

    def want_by_interval(self, state: RunState) -> None:
        """Mark as due the held-out sets whose evaluation interval ends at this step."""
        common = state.knobs.evaluation_interval_steps
        self._want(state, [e.name for e in self.plan.sets if state.version % (e.interval_steps or common) == 0])

    def want_last(self, state: RunState) -> list[Effect]:
        """Replace the current evaluation by one of the final weights; called when no further step will be trained."""
        effects: list[Effect] = []
        if state.evaluations.current is not None:
            effects.append(_abandoned(state.evaluations.current, "the run ends, and its last weights are evaluated"))
            release(state)
        state.evaluations.current = state.evaluations.due = None
        self.want(state)
        return effects

    def forget_lost(self, state: RunState) -> None:
        """Drop a due evaluation of weights that a restart of the trainer has lost: its step makes it due again."""
        due = state.evaluations.due
        if due is not None and due.version > state.version:
            state.evaluations.due = None

    def advance(self, state: RunState, *, now: float) -> list[Effect]:
        """After any input, restart an evaluation whose pin broke, begin one that is due, and issue more questions."""
        effects: list[Effect] = []
        if state.evaluations.current is not None and (reason := broken(state) or _frozen(state, now=now)):
            effects += self._restart(state, state.evaluations.current, reason)
        if state.evaluations.due is not None and state.evaluations.current is None:
            effects += self._begin(state, state.evaluations.due, now=now)
        if state.evaluations.current is not None:
            self._check_deadlines(state, state.evaluations.current, now=now)
            indices = state.evaluations.current.next_questions(self._window(state, state.evaluations.current, now=now))
            effects += self.questions(state.evaluations.current, indices)
        return effects

    def on_answer(
        self, state: RunState, order_id: str, index: int, answer: EvaluationDone | None, *, now: float
    ) -> list[Effect]:
        """Process the answer to question `index` (None if the question failed); reissue the question if needed."""
        evaluation = state.evaluations.current
        if evaluation is None or not evaluation.concerns(order_id):
            return []
        return self.questions(evaluation, [index] if evaluation.add(index, answer, now=now) else [])

    def closed(self, state: RunState) -> list[EvaluationResult]:
        """If the evaluation has just ended, release the pinned engine and return the result of each set; else []."""
        evaluation = state.evaluations.current
        if evaluation is None or not (evaluation.complete or evaluation.given_up):
            return []
        release(state)
        state.evaluations.current = None
        seed = rng.key(self._orders.seed, "evaluation-interval")
        return evaluation.results(version=state.version, seed=seed)

    def questions(self, evaluation: Evaluation, indices: list[int]) -> list[Effect]:
        """Issue the questions `indices` of the evaluation."""
        plan, version, number, engine = evaluation.plan, evaluation.model_version, evaluation.number, evaluation.engine
        orders = [
            self._orders.evaluation(plan, each, version=version, number=number, engine=engine) for each in indices
        ]
        return [IssuePrompts(orders)] if orders else []

    # --- details ---------------------------------------------------------------------------------------------------

    def _want(self, state: RunState, names: list[str]) -> None:
        current, due = state.evaluations.current, state.evaluations.due
        known = {*(each.name for each in current.plan.sets)} if current is not None else set()
        known |= {*due.sets} if due is not None else set()
        if new := tuple(name for name in names if name not in known):
            due = due or EvaluationDue(version=state.version, sets=())
            state.evaluations.due = replace(due, sets=due.sets + new)

    def _begin(self, state: RunState, due: EvaluationDue, *, now: float) -> list[Effect]:
        """Begin the due evaluation once engines serve suitable weights and no publication is under way."""
        loaded = {url: state.fleet.by_url[url].loaded for url in state.fleet.verified()}
        if not loaded or (state.phase is RunPhase.TRAINING and state.trainer.publishes):
            return []
        # When the run is finishing, nothing more is published, so all engines may answer, even with older weights.
        last = state.phase is RunPhase.FINISHING
        ready = sorted(url for url in state.fleet.serving() if loaded[url] >= due.version)
        agreed = len(set(loaded.values())) == 1 and min(loaded.values()) >= due.version
        pin, engine, version = self.plan.pin, "", state.version
        if pin in (Pin.AUTO, Pin.ENGINE):
            # The number of engines includes those that have not passed the canary check yet.
            several = len({*loaded, *state.fleet.to_verify()}) > 1
            pin = Pin.ENGINE if several and state.version > 0 and not last else Pin.GATE
        if pin is Pin.GATE and last and not agreed:
            pin = Pin.NONE
        match pin:
            case Pin.ENGINE:
                if not ready or len(loaded) < 2:
                    return []
                engine, version = ready[-1], loaded[ready[-1]]
                state.fleet.pin(engine)
            case Pin.GATE:
                if not agreed:
                    return []
                version = min(loaded.values())
        state.evaluations.due = None
        state.evaluations.begun += 1
        state.evaluations.current = Evaluation(
            model_version=version,
            number=state.evaluations.begun,
            plan=self.plan.of(due.sets),
            epoch=state.epoch,
            pin=pin,
            engine=engine,
            last_report_at=now,
            restarts=due.restarts,
            discarded=dict(due.discarded),
        )
        fields = {"model_version": version, "pin": pin, "engine": engine, "sets": list(due.sets)}
        return [Record("evaluation_began", fields)]

    def _restart(self, state: RunState, evaluation: Evaluation, reason: str) -> list[Effect]:
        if evaluation.restarts >= self.plan.restarts:
            evaluation.given_up = f"its pin broke {evaluation.restarts + 1} times, most recently because {reason}"
            return []
        release(state)
        state.evaluations.current = None
        waiting = state.evaluations.due
        state.evaluations.due = EvaluationDue(
            version=state.version,
            sets=tuple(each.name for each in evaluation.plan.sets) + (waiting.sets if waiting is not None else ()),
            restarts=evaluation.restarts + 1,
            discarded=evaluation.discarded,
        )
        return [_abandoned(evaluation, reason)]

    def _check_deadlines(self, state: RunState, evaluation: Evaluation, *, now: float) -> None:
        if now - evaluation.last_report_at > self.plan.grace_s:
            evaluation.given_up = f"no answer arrived for {self.plan.grace_s:g} s"
        elif holds_updates(state):
            evaluation.held_since = now if evaluation.held_since is None else evaluation.held_since
            if now - evaluation.held_since > self.plan.hold_s:
                evaluation.given_up = f"updates were postponed for {self.plan.hold_s:g} s (evaluation.hold_s)"

    def _window(self, state: RunState, evaluation: Evaluation, *, now: float) -> int:
        """Return the limit of questions in flight: all questions, or the pinned engine's share of actor capacity."""
        if evaluation.given_up:
            return 0
        if evaluation.pin is not Pin.ENGINE:
            return evaluation.plan.problems
        room = state.knobs.groups_in_flight * max(1, len(state.live_actors(now)))
        return max(1, room // (1 + len(state.fleet.verified())))


def holds_updates(state: RunState) -> bool:
    """Return True if publications must wait, since they would change the weights that an evaluation measures."""
    evaluation = state.evaluations.current
    held = evaluation is not None and evaluation.pin is Pin.GATE and not evaluation.given_up
    return held and state.phase is RunPhase.TRAINING and state.version != evaluation.model_version  # type: ignore[union-attr]


def comes_first(state: RunState) -> bool:
    """Return True while training waits, because an evaluation is running or due before the first step."""
    return state.version == 0 and (state.evaluations.current is not None or state.evaluations.due is not None)


def broken(state: RunState) -> str:
    """Return why the pin of the current evaluation broke: weights changed, or its engine was lost. Empty if intact."""
    evaluation, fleet = state.evaluations.current, state.fleet
    if evaluation is None or evaluation.pin is Pin.NONE:
        return ""
    if evaluation.epoch != state.epoch:
        return f"epoch {state.epoch} has begun"
    watched = [evaluation.engine] if evaluation.pin is Pin.ENGINE else fleet.verified()
    for url in watched:
        record = fleet.by_url[url]
        if evaluation.pin is Pin.ENGINE and url not in fleet.pinned():
            return f"{url} is {record.lifecycle}" + (f": {record.last_error}" if record.last_error else "")
        if record.loaded != evaluation.model_version:
            return f"{url} has loaded version {record.loaded}"
    return ""


def _frozen(state: RunState, *, now: float) -> str:
    """Return that the pinned engine has not answered polls for a while, if another engine can evaluate; else empty.

    No answer of one version can move to an engine with another one, so the evaluation restarts there.
    """
    evaluation = state.evaluations.current
    assert evaluation is not None
    record = state.fleet.by_url.get(evaluation.engine)
    if evaluation.pin is not Pin.ENGINE or record is None or record.lifecycle is not EngineLifecycle.SUSPECT:
        evaluation.suspect_since = None
        return ""
    evaluation.suspect_since = now if evaluation.suspect_since is None else evaluation.suspect_since
    silent_s = now - evaluation.suspect_since
    return f"{evaluation.engine} is suspect" if silent_s > _SUSPECT_S and state.fleet.serving() else ""


def release(state: RunState) -> None:
    """Unpin the engine that was pinned for the evaluation, if any; it serves again once it has the newest weights."""
    if state.evaluations.current is not None and state.evaluations.current.engine:
        state.fleet.release(state.evaluations.current.engine, version=state.version)


def _abandoned(evaluation: Evaluation, reason: str) -> Record:
    fields = {"model_version": evaluation.model_version, "reason": reason, "answered": len(evaluation.answers)}
    return Record(
        "evaluation_restarted", fields | {"problems": evaluation.plan.problems, "restarts": evaluation.restarts + 1}
    )
