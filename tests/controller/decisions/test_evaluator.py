"""Tests of evaluations under random schedules: one model version answers each evaluation, and training continues."""

import random
from dataclasses import replace

import msgspec
import pytest

from pipelinerl.config.evaluation import EvaluationSet
from pipelinerl.controller.decisions.evaluator import holds_updates
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.decisions.status import run_status
from pipelinerl.controller.decisions.watch import EngineWatch
from pipelinerl.controller.state.inputs_and_effects import (
    EngineAnswered,
    EngineDrainAsked,
    EngineRegistered,
    EngineTimedOut,
    HealthCheckMissed,
    StopAsked,
    Ticked,
)
from pipelinerl.enums import Pin
from pipelinerl.messages import EvaluationDone, TrainerReady
from pipelinerl.types import Purpose
from tests.controller.world import ENGINE, OTHER, World, assert_sound, controller, failed, records

BOTH = (ENGINE, OTHER)


def world(seed=0, *, engines=BOTH, **changes):
    return World(controller(**({"pin": Pin.AUTO} | changes)), random.Random(seed), engines=engines)


def recorded(run):
    """Return a list to which all later events of the run are appended."""
    events, apply = [], run.apply

    def listening(effects):
        events.extend(records(effects))
        apply(effects)

    run.apply = listening
    return events


def abandoned(events):
    return [event.fields["reason"] for event in events if event.kind == "evaluation_restarted"]


def results(run):
    return run.state.evaluations.results


def until_evaluation(run, version):
    return run.play(lambda: (now := run.state.evaluations.current) is not None and now.model_version >= version)


def evaluating(**changes):
    """Return a run whose actors lose the requests of the evaluation in progress, which is of version 5 or later."""
    return until_evaluation(unanswering(world(**{"evaluation_problems": 3, "steps": 1000} | changes).begin()), 5)


def unanswering(run):
    """Let actors lose the requests of every evaluation except the first; return `run`."""
    sample = run.sample

    def only_training():
        run.orders = [o for o in run.orders if o.purpose is Purpose.TRAINING or o.order_id.startswith("eval-0-")]
        sample()

    run.sample = only_training
    return run


def test_late_answer_to_an_abandoned_evaluation_is_ignored_by_the_next_evaluation():
    run = world(engines=(ENGINE,)).begin(serves=True)
    old = list(run.orders)
    run.ready("2")
    run.publish()
    evaluation = run.state.evaluations.current
    assert evaluation.restarts == 1
    for order in old:
        run.tell(failed(order, "the engine died"))
    assert run.state.evaluations.current.answers == {}


@pytest.mark.parametrize("pin", [Pin.AUTO, Pin.GATE, Pin.ENGINE])
@pytest.mark.parametrize("engines", [BOTH, (ENGINE,)], ids=["two engines", "one engine"])
@pytest.mark.parametrize("seed", range(4))
def test_each_evaluation_under_a_random_schedule_is_answered_by_a_single_weight_version(seed, engines, pin):
    chance = random.Random(seed)
    run = world(seed, engines=engines, pin=pin, k=chance.choice([1, 2, 4]), evaluation_problems=12, steps=40).begin()

    def lose_engines():
        # In the last steps, a timeout could leave weights unpublished.
        if chance.random() < 0.01 and run.version < 39:
            run.give(EngineTimedOut(now=0.0, url=chance.choice(engines), reason="test"))
        if chance.random() < 0.05:
            for url in engines:
                run.give(EngineAnswered(now=0.0, url=url))

    run.play(between=lose_engines)
    assert run.finished == "all 40 steps are done"
    assert_sound(run)
    outcomes = results(run)
    assert outcomes[-1].model_version == 40
    assert all(result.one_version for result in outcomes)
    assert all(result.version_min == result.version_max == result.model_version for result in outcomes)
    used = {result.pin for result in outcomes[1:-1]}
    assert used <= ({Pin.GATE} if pin is Pin.GATE or len(engines) == 1 else {Pin.ENGINE, Pin.GATE})
    assert run.state.fleet.pinned() == []


def test_pinned_engine_answers_an_evaluation_while_training_continues_on_the_other_engine():
    run = world(evaluation_problems=30, steps=1000, k=2)
    events = recorded(run)
    run.begin()
    until_evaluation(run, 5)
    questions = [order.engine for order in run.orders if order.purpose is Purpose.EVALUATION]
    assert questions == [OTHER] * 4, "half of the room for eight groups"
    unanswering(run)
    pinned = run.state.evaluations.current
    assert (pinned.pin, pinned.engine) == (Pin.ENGINE, OTHER)
    assert run.state.fleet.serving() == [ENGINE]
    at = pinned.model_version
    run.until_version(at + 20)
    assert run.state.evaluations.current is pinned, "it takes its time"
    assert run.loaded[OTHER] == at < run.loaded[ENGINE]
    assert {run.where[f"prompt-{group.index:06d}"] for _, groups, _ in run.trained[-10:] for group in groups} == {
        ENGINE
    }
    run.give(Ticked(now=121.0))
    (result,) = results(run)[1:]
    assert (result.pin, result.engine, result.model_version) == (Pin.ENGINE, OTHER, at)
    assert result.incomplete == "no answer arrived for 120 s" and result.steps_meanwhile >= 20
    assert run.directive.to_verify == [OTHER], "it catches up at once, and proves it"
    while run.publications:
        run.publish()
    assert run.state.fleet.serving() == list(BOTH)
    assert [e.kind for e in events if e.kind.startswith("evaluation")].count("evaluation_began") == 2


def test_evaluation_that_postpones_weight_updates_is_abandoned_at_its_time_limit():
    """The limit counts from the first postponed update: a step may take longer than the limit."""
    run = evaluating(engines=(ENGINE,), k=2)
    at = run.state.evaluations.current.model_version
    run.give(Ticked(now=70.0))
    assert run.state.evaluations.current.held_since is None
    for _ in range(2000):
        run.act()
    assert run.loaded[ENGINE] == at
    assert run.version == at + 2, "training goes on as far as its rollouts are fresh"
    assert "updates are postponed" in waiting_for(run.state, now=0.0)
    run.give(Ticked(now=run.state.evaluations.current.held_since + 59.0))
    assert holds_updates(run.state)
    run.give(Ticked(now=run.state.evaluations.current.held_since + 61.0))
    assert results(run)[-1].incomplete == "updates were postponed for 60 s (evaluation.hold_s)"
    assert run.directive.publish_to == [ENGINE]
    run.publish()
    run.until_version(at + 5)


def test_evaluation_restarts_when_its_pinned_engine_is_lost_and_ends_after_too_many_restarts():
    run = world(engines=(*BOTH, "http://engine-2"), evaluation_problems=3, steps=1000)
    events = recorded(run)
    run.begin()
    until_evaluation(unanswering(run), 5)
    for life in range(1, 5):
        evaluation = run.state.evaluations.current
        assert evaluation.restarts == life - 1
        run.give(EngineTimedOut(now=0.0, url=evaluation.engine, reason="killed"))
        run.give(EngineAnswered(now=0.0, url=evaluation.engine))
        if life < 4:
            assert abandoned(events)[life - 1 :] == [f"{evaluation.engine} is dead: killed"]
            while run.publications:
                run.publish()
            until_evaluation(run, evaluation.model_version)
    assert results(run)[-1].incomplete.startswith(
        f"its pin broke 4 times, most recently because {evaluation.engine} is"
    )


def test_evaluation_leaves_an_engine_that_is_suspect_for_longer_than_5_s():
    run = evaluating()
    events = recorded(run)
    run.give(HealthCheckMissed(now=10.0, url=OTHER))
    run.give(Ticked(now=14.0))
    run.give(EngineAnswered(now=14.5, url=OTHER))
    run.give(HealthCheckMissed(now=15.0, url=OTHER))
    run.give(Ticked(now=20.0))
    assert abandoned(events) == []
    run.give(Ticked(now=20.1))
    assert abandoned(events) == [f"{OTHER} is suspect"]
    until_evaluation(run, 5)
    evaluation = run.state.evaluations.current
    assert evaluation.engine != OTHER


def test_evaluation_restarts_when_its_engine_drains_or_a_new_trainer_begins():
    run = evaluating()
    events = recorded(run)
    run.give(EngineDrainAsked(now=0.0, url=OTHER, grace_s=9.0))
    assert abandoned(events) == [f"{OTHER} is draining"]
    run = evaluating()
    events = recorded(run)
    run.tell(TrainerReady(report_id="ready-2", incarnation="2", model_version=5, consumed=run.consumed()))
    assert abandoned(events) == ["epoch 2 has begun"]


def test_engine_that_joins_while_weight_updates_are_postponed_waits_for_its_weights():
    run = evaluating(engines=(ENGINE,), k=4)
    at = run.version
    while run.version == at:
        run.act()
    run.give(EngineRegistered(now=0.0, url=OTHER))
    for _ in range(500):
        run.act()
    assert OTHER not in run.loaded
    run.give(Ticked(now=121.0))
    run.publish()
    assert run.state.fleet.serving() == list(BOTH)


def test_stopped_run_evaluates_its_final_weights_with_all_engines():
    run = evaluating()
    events = recorded(run)
    run.give(StopAsked(now=0.0, reason="enough"))
    assert run.directive.publish_to == list(BOTH), "the pinned one, too"
    run.train()
    assert abandoned(events) == ["the run ends, and its last weights are evaluated"]
    evaluation = run.state.evaluations.current
    assert (evaluation.pin, evaluation.model_version) == (Pin.GATE, run.version)
    assert {order.engine for order in run.orders[-3:]} == {""}


@pytest.mark.parametrize(("fails", "at_least"), [(0, 1.0), (1, 2 / 3), (2, 1 / 3), (3, None)])
def test_problems_without_an_answer_count_as_wrong_for_the_target_accuracy(fails, at_least):
    """Actors mostly give up long answers, so the accuracy over the other answers is biased."""
    run = world(engines=(ENGINE,), steps=1000, until_accuracy=0.5).begin(serves=True)
    for _ in range(run.controller.settings.evaluation.attempts):
        questions = [order for order in run.orders if order.index < fails]
        run.orders = [order for order in run.orders if order not in questions]
        for order in questions:
            run.tell(failed(order, "too long"))
    run.play(lambda: results(run))
    (result,) = results(run)
    assert result.accuracy == (None if fails == 3 else 1.0)
    assert result.incomplete == (f"{fails} of 3 problems had no answer" if fails else "")
    assert result.at_least == (at_least and pytest.approx(at_least))
    ends = at_least is not None and at_least >= 0.5
    assert run.controller.ending == (f"held-out accuracy {at_least:.3f} has reached 0.5" if ends else None)


HARD = EvaluationSet(name="hard", place=1, problems=4, max_tokens=8, samples=2, interval_steps=15)


@pytest.mark.parametrize("engines", [BOTH, (ENGINE,)], ids=["two engines", "one engine"])
@pytest.mark.parametrize("seed", range(6))
def test_evaluation_sets_follow_their_intervals_and_share_one_version_when_due_together(seed, engines):
    run = world(seed, engines=engines, k=4, steps=40, other_sets=(HARD,))
    events = recorded(run)
    run.begin()
    run.play()
    assert run.finished == "all 40 steps are done"
    by_set = {name: [each for each in results(run) if each.name == name] for name in ("held_out", "hard")}
    assert {each.problems for each in by_set["hard"]} == {4} and {each.problems for each in by_set["held_out"]} == {3}
    assert len(by_set["held_out"]) > len(by_set["hard"]) >= 4, "before step 1, about 15 and 30, and after 40"
    began = [event.fields for event in events if event.kind == "evaluation_began"]
    assert (began[0]["sets"], began[-1]["sets"]) == (["held_out", "hard"], ["held_out", "hard"])
    for name, of_set in by_set.items():
        versions = [event["model_version"] for event in began if name in event["sets"]]
        assert [each.model_version for each in of_set] == versions, "an evaluation asks the sets that it says"
    assert all(each.one_version and each.incomplete == "" for each in results(run))
    kept = [each.name for each in results(run) if each.by_domain]
    assert sorted(kept) == ["hard", "held_out"], "figures by domain are of the last of each set"


def test_evaluation_set_that_becomes_due_during_an_evaluation_runs_once_afterwards():
    often = replace(HARD, interval_steps=2, problems=2)
    run = world(evaluation_problems=30, steps=1000, k=2, other_sets=(often,))
    events = recorded(run)
    run.begin()

    def asks_first_set():
        current = run.state.evaluations.current
        return current is not None and run.version >= 5 and [each.name for each in current.plan.sets] == ["held_out"]

    current = run.play(asks_first_set).state.evaluations.current
    unanswering(run)
    run.until_version(current.model_version + 12)
    waiting = run.state.evaluations.due
    assert run.state.evaluations.current is current
    assert waiting.sets == ("hard",), "its own set is under way, the other waits"
    run.give(Ticked(now=1000.0))
    assert results(run)[-1].name == "held_out" and results(run)[-1].incomplete
    del run.__dict__["sample"]
    before = len(events)
    while not [event for event in events[before:] if event.kind == "evaluation_began"]:
        run.act()
    (began,) = [event.fields["sets"] for event in events[before:] if event.kind == "evaluation_began"]
    assert began == ["hard"]


def test_only_the_accuracy_of_the_first_evaluation_set_can_end_the_run():
    run = world(steps=40, other_sets=(HARD,), until_accuracy=0.9).begin()
    run.play()
    assert run.finished == "held-out accuracy 1.000 of held_out has reached 0.9"
    assert {each.place: each.accuracy for each in results(run)} == {0: 1.0, 1: 1.0}
    swapped = world(steps=6, other_sets=(replace(HARD, samples=1),), until_accuracy=0.9)
    wrong_first(swapped)
    swapped.begin()
    swapped.play()
    assert {each.place: each.accuracy for each in results(swapped)} == {0: 0.0, 1: 1.0}
    assert swapped.finished == "all 6 steps are done"


def wrong_first(run):
    """Make every answer to a problem of the first set wrong."""
    tell = run.tell

    def report_wrong_first(report):
        current = run.state.evaluations.current
        if isinstance(report, EvaluationDone) and current is not None and current.concerns(report.order_id):
            place = current.plan.question(report.index)[0].place
            report = msgspec.structs.replace(report, correct=report.correct * place)
        tell(report)

    run.tell = report_wrong_first


def test_status_shows_each_accuracy_with_the_name_of_its_evaluation_set():
    run = world(steps=40, other_sets=(HARD,)).begin()
    while len(results(run)) < 2:
        run.act()
    shown = run_status(run.controller, watch=EngineWatch(), name="r", now=1.0, elapsed_s=1.0)
    assert (shown.held_out.name, shown.held_out.accuracy) == ("held_out", 1.0)
    assert [(each.name, each.accuracy, each.first) for each in shown.other_sets] == [("hard", 1.0, 1.0)]
    until_evaluation(run, 5)
    shown = run_status(run.controller, watch=EngineWatch(), name="r", now=1.0, elapsed_s=1.0)
    assert shown.evaluating.sets == ("held_out",)
