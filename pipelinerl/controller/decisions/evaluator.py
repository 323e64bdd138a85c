"""Pure rules for when held-out problems are evaluated, with which weights, and when an evaluation ends.

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

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from pipelinerl import rng
from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.state.evaluation import Evaluation, EvaluationDue, EvaluationPlan, EvaluationResult
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import Effect, IssuePrompts, Record
from pipelinerl.controller.state.run_state import ControllerSettings, RunPhase, RunState
from pipelinerl.enums import Pin
from pipelinerl.types import DomainSampling, Problem, PromptOrder, Purpose

#: An evaluation leaves a pinned engine that has been suspect for longer than this; a dead one it leaves at once.
_SUSPECT_S: Final = 5.0


def want(state: RunState, sets: Iterable[EvaluationSet]) -> None:
    """Mark as due an evaluation of these sets with the current weights, unless they are due or evaluated already."""
    current, due = state.evaluations.current, state.evaluations.due
    known = {each.name for each in current.plan.sets} if current is not None else set()
    known |= {*due.sets} if due is not None else set()
    if new := tuple(each.name for each in sets if each.name not in known):
        due = due or EvaluationDue(version=state.version, sets=())
        state.evaluations.due = replace(due, sets=due.sets + new)


def want_last(state: RunState, settings: ControllerSettings) -> list[Effect]:
    """Replace the current evaluation by one of the final weights; called when no further step will be trained."""
    effects: list[Effect] = []
    if state.evaluations.current is not None:
        effects.append(_abandoned(state.evaluations.current, "the run ends, and its last weights are evaluated"))
        release(state)
    state.evaluations.current = state.evaluations.due = None
    want(state, settings.evaluation.sets)
    return effects


def advance(
    state: RunState, settings: ControllerSettings, held_out_problem: Callable[[str, int], Problem], *, now: float
) -> list[Effect]:
    """After any input, restart an evaluation whose pin broke, begin one that is due, and issue more questions."""
    effects: list[Effect] = []
    evaluations, plan = state.evaluations, settings.evaluation
    current = evaluations.current
    if current is not None and (reason := _broken(state, current, now=now)):
        if current.restarts >= plan.restarts:
            current.given_up = f"its pin broke {current.restarts + 1} times, most recently because {reason}"
        else:
            release(state)
            waiting = evaluations.due.sets if evaluations.due is not None else ()
            evaluations.due = EvaluationDue(
                version=state.version,
                sets=tuple(each.name for each in current.plan.sets) + waiting,
                restarts=current.restarts + 1,
                discarded=current.discarded,
            )
            evaluations.current = None
            effects.append(_abandoned(current, reason))
    if evaluations.due is not None and evaluations.current is None:
        effects += _begin(state, settings, evaluations.due, now=now)
    current = evaluations.current
    if current is None:
        return effects
    if now - current.last_report_at > plan.grace_s:
        current.given_up = f"no answer arrived for {plan.grace_s:g} s"
    elif holds_updates(state):
        current.held_since = now if current.held_since is None else current.held_since
        if now - current.held_since > plan.hold_s:
            current.given_up = f"updates were postponed for {plan.hold_s:g} s (evaluation.hold_s)"
    in_flight = current.plan.problems
    if current.given_up:
        in_flight = 0
    elif current.pin is Pin.ENGINE:  # the pinned engine's share of the actors' capacity
        room = state.knobs.groups_in_flight * max(1, len(state.live_actors(now)))
        in_flight = max(1, room // (1 + len(state.fleet.verified())))
    return effects + questions(settings, current, current.next_questions(in_flight), held_out_problem)


def questions(
    settings: ControllerSettings,
    evaluation: Evaluation,
    indices: list[int],
    held_out_problem: Callable[[str, int], Problem],
) -> list[Effect]:
    """Issue the questions `indices` of the evaluation."""
    orders = [
        evaluation_order(
            settings,
            evaluation.plan,
            index,
            held_out_problem,
            version=evaluation.model_version,
            number=evaluation.number,
            engine=evaluation.engine,
        )
        for index in indices
    ]
    return [IssuePrompts(orders)] if orders else []


def evaluation_order(
    settings: ControllerSettings,
    plan: EvaluationPlan,
    index: int,
    held_out_problem: Callable[[str, int], Problem],
    *,
    version: int,
    number: int,
    engine: str = "",
) -> PromptOrder:
    """Return the order for question `index` of evaluation `number`, which evaluates `version`.

    `held_out_problem` returns a problem, from its set's name and its index in the set. If `engine` is given, only this
    engine may answer. Apart from id and engine, the order is the same in every evaluation, so a sample depends only on
    seed and weights. The set's temperature applies, and its length limit if it has one; else those of the domain apply
    before those of the run.
    """
    asked, place = plan.question(index)
    problem = held_out_problem(asked.name, place)
    own = settings.by_domain.get(problem.domain, DomainSampling())
    sampling = own.of(settings.sampling)
    return PromptOrder(
        order_id=f"eval-{version}-{number}-{index:06d}",
        index=index,
        purpose=Purpose.EVALUATION,
        problem=problem,
        sampling=replace(
            sampling,
            num_samples=asked.samples,
            temperature=asked.temperature,
            top_p=1.0,
            top_k=0,
            max_tokens=asked.max_tokens or sampling.max_tokens,
        ),
        seed=rng.key(settings.run.seed, "evaluation", place),
        engine=engine,
        chat_template_kwargs=own.chat_template_kwargs,
    )


def closed(state: RunState, settings: ControllerSettings) -> list[EvaluationResult]:
    """If the evaluation has just ended, release the pinned engine and return the result of each set; else []."""
    evaluation = state.evaluations.current
    if evaluation is None or not (evaluation.complete or evaluation.given_up):
        return []
    release(state)
    state.evaluations.current = None
    return evaluation.results(version=state.version, seed=rng.key(settings.run.seed, "evaluation-interval"))


def _begin(state: RunState, settings: ControllerSettings, due: EvaluationDue, *, now: float) -> list[Effect]:
    """Begin the due evaluation once engines serve suitable weights and no publication is under way."""
    loaded = {url: state.fleet.by_url[url].loaded for url in state.fleet.verified()}
    publishes = any(not each.reported for each in state.trainer.publications)
    if not loaded or (state.phase is RunPhase.TRAINING and publishes):
        return []
    # When the run is finishing, nothing more is published, so all engines may answer, even with older weights.
    last = state.phase is RunPhase.FINISHING
    ready = sorted(url for url in state.fleet.serving() if loaded[url] >= due.version)
    agreed = len(set(loaded.values())) == 1 and min(loaded.values()) >= due.version
    pin, engine, version = settings.evaluation.pin, "", state.version
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
        plan=settings.evaluation.of(due.sets),
        epoch=state.epoch,
        pin=pin,
        engine=engine,
        last_report_at=now,
        restarts=due.restarts,
        discarded=dict(due.discarded),
    )
    fields = {"model_version": version, "pin": pin, "engine": engine, "sets": list(due.sets)}
    return [Record("evaluation_began", fields)]


def holds_updates(state: RunState) -> bool:
    """Return True if publications must wait, since they would change the weights that an evaluation measures."""
    evaluation = state.evaluations.current
    held = evaluation is not None and evaluation.pin is Pin.GATE and not evaluation.given_up
    return held and state.phase is RunPhase.TRAINING and state.version != evaluation.model_version  # type: ignore[union-attr]


def comes_first(state: RunState) -> bool:
    """Return True while training waits, because an evaluation is running or due before the first step."""
    return state.version == 0 and (state.evaluations.current is not None or state.evaluations.due is not None)


def _broken(state: RunState, evaluation: Evaluation, *, now: float) -> str:
    """Return why the pin of the current evaluation broke: weights changed, or its engine was lost. Empty if intact.

    A pinned engine that does not answer polls for a while is lost if another engine can evaluate: no answer of one
    version can move to an engine with another one, so the evaluation restarts there.
    """
    fleet = state.fleet
    if evaluation.pin is Pin.NONE:
        return ""
    if evaluation.epoch != state.epoch:
        return f"epoch {state.epoch} has begun"
    for url in [evaluation.engine] if evaluation.pin is Pin.ENGINE else fleet.verified():
        record = fleet.by_url[url]
        if evaluation.pin is Pin.ENGINE and url not in fleet.pinned():
            return f"{url} is {record.lifecycle}" + (f": {record.last_error}" if record.last_error else "")
        if record.loaded != evaluation.model_version:
            return f"{url} has loaded version {record.loaded}"
    if evaluation.pin is not Pin.ENGINE or fleet.by_url[evaluation.engine].lifecycle is not EngineLifecycle.SUSPECT:
        evaluation.suspect_since = None
        return ""
    evaluation.suspect_since = now if evaluation.suspect_since is None else evaluation.suspect_since
    is_frozen = now - evaluation.suspect_since > _SUSPECT_S and fleet.serving()
    return f"{evaluation.engine} is suspect" if is_frozen else ""


def release(state: RunState) -> None:
    """Unpin the engine that was pinned for the evaluation, if any; it serves again once it has the newest weights."""
    if state.evaluations.current is not None and state.evaluations.current.engine:
        state.fleet.release(state.evaluations.current.engine, version=state.version)


def _abandoned(evaluation: Evaluation, reason: str) -> Record:
    fields = {"model_version": evaluation.model_version, "reason": reason, "answered": len(evaluation.answers)}
    return Record(
        "evaluation_restarted", fields | {"problems": evaluation.plan.problems, "restarts": evaluation.restarts + 1}
    )
