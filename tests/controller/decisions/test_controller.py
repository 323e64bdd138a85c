"""Tests of the controller's invariants under random schedules, and of single decisions."""

import math
import random

import pytest

from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.decisions.status import assignment_of
from pipelinerl.controller.state.inputs_and_effects import (
    EngineRegistered,
    EngineRemoved,
    EngineRestarted,
    IssuePrompts,
    KnobsPatched,
    Record,
    Send,
    StreamsLost,
)
from pipelinerl.controller.state.issued_ledger import FilteredShare
from pipelinerl.controller.state.lag import Turns
from pipelinerl.controller.state.run_state import RunPhase
from pipelinerl.enums import Overdue, Pin, StalenessScope
from pipelinerl.messages import Checkpointed, Starving, TrainerLeaving, TrainerStopped
from tests.controller.world import (
    ENGINE,
    OTHER,
    World,
    alive,
    assert_sound,
    controller,
    directives,
    drawn_problem,
    joins,
    ready,
    received,
)

#: The seeds with which each invariant is tested; seeds from 25 on run only with the slow tests.
FEW_OF_100 = [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 100))]


def world(seed=0, **changes):
    return World(controller(**changes), random.Random(seed))


@pytest.mark.parametrize("seed", FEW_OF_100)
def test_runs_under_random_schedules_finish_and_keep_all_invariants(seed):
    rng = random.Random(seed)
    run = world(seed, k=rng.choice([1, 2, 4, math.inf])).begin()

    def turn_knobs():
        if rng.random() < 0.002:
            j = rng.choice([1, 2, 3])
            change = {
                "j": j,
                "k": rng.choice([j, j + 2, "inf"]),
                "rollouts_per_step": rng.choice([2, 4, 8]),
                "temperature": rng.choice([0.5, 1.0]),
                "evaluation_interval_steps": rng.choice([2, 5, 50]),
                "groups_in_flight": rng.choice([1, 8]),
                "domain_weights.a": rng.choice([0, 1, 3]),
            }
            run.give(KnobsPatched(now=0.0, changes=change, who="test", time=0.0))

    run.play(between=turn_knobs)
    assert run.finished == "all 20 steps are done"
    assert_sound(run)
    assert run.issued == list(range(len(run.issued))), "prompts are issued once each, in order"
    for order in run.orders_issued:
        weights, quota = run.state.domain_weights_of(order.index), run.state.quota_of(order.index)
        assert order.problem == drawn_problem(order.index, weights, quota), (
            "the mixture is that of the order's first issue"
        )


@pytest.mark.parametrize("seed", range(30))
def test_mixed_group_sizes_fill_steps_with_whole_groups(seed):
    """Groups fail, are filtered and become stale at random; in lockstep, only one step's groups are in flight."""
    rng = random.Random(seed)
    lockstep, large = seed % 3 == 0, rng.choice([3, 4, 7])
    k = 1 if lockstep else rng.choice([2, 4, math.inf])
    oversample = 1.0 if lockstep else rng.choice([1.0, 3.0, None])
    overdue = rng.choice(list(Overdue))
    run = world(seed, k=k, large=large, rollouts_per_step=8, oversample=oversample, overdue=overdue).begin()
    account = run.state.account

    def check():
        assert len(account.sent) == account.in_flight, "the size of whatever is out is known, and of nothing else"
        assert not lockstep or account.rollouts_in_flight(0) < 8 + large

    run.play(between=check)
    assert run.finished == "all 20 steps are done"
    assert_sound(run)
    for _, groups, _ in run.trained:
        sizes = [len(each.rollouts) for each in groups]
        assert 8 <= sum(sizes) < 8 + max(sizes), "a step ends with the group that fills it"
    requested_sizes = {order.index: order.sampling.num_samples for order in run.orders_issued}
    assert set(requested_sizes.values()) == {large, 2}
    assert all(requested_sizes[each.index] == len(each.rollouts) for _, groups, _ in run.trained for each in groups)


@pytest.mark.parametrize("seed", range(20))
def test_run_ends_after_three_nonfinite_steps_in_a_row_and_its_group_counts_add_up(seed):
    run = world(seed)
    run.poison = 0.2 if seed % 2 else 0.7
    run.begin().play()
    wrecked = f"step {run.version + 1} was skipped 3 times in a row: rewards"
    assert run.finished == ("all 20 steps are done" if run.skipped < 3 else wrecked)
    assert run.state.version == run.version
    assert_sound(run)
    if seed % 2 == 0:
        assert run.skipped == 3, "at 0.7, three in a row come within 20 steps"


def test_run_with_staleness_bounds_j_and_k_of_one_trains_each_step_on_the_latest_version():
    """At most the prompts of one step are in flight, and all groups of a step come from one version."""
    run = world(k=1, j=1).begin()
    in_flight = set()
    run.play(between=lambda: in_flight.add(run.state.account.in_flight))
    assert max(in_flight) == run.state.knobs.groups_per_step
    for version, groups, _ in run.trained:
        assert {g.oldest_version for g in groups} == {version - 1}


@pytest.mark.parametrize(
    ("oversample", "k", "issued"), [(1.0, 4, 4), (None, 4, 8), (4.0, 4, 8), (1.5, 4, 6), (None, 1, 2), (4.0, 1, 4)]
)
def test_controller_requests_extra_groups_for_expected_filtering_by_default_except_in_lockstep(oversample, k, issued):
    run = World(controller(evaluation_problems=0, oversample=oversample, k=k))
    run.state.filtered_share = FilteredShare(trained=1e6, filtered=1e6)
    run.begin(serves=True)
    assert len(run.issued) == issued


@pytest.mark.parametrize(
    ("settings", "k"), [({}, 4.0), ({"overdue": Overdue.WAIT}, None), ({"scope": StalenessScope.ROLLOUT}, None)]
)
def test_actors_get_no_staleness_limit_if_overdue_groups_may_still_be_trained_on(settings, k):
    made = controller(k=4, **settings)
    assert assignment_of(made.state, made.settings).k == k


@pytest.mark.parametrize("seed", FEW_OF_100)
def test_run_whose_trainer_waits_for_overdue_groups_drops_no_group_and_finishes(seed):
    """Groups fail, are dropped by actors or filtered, and engines are updated at random."""
    noise = random.Random(seed)
    k = noise.choice([1, 2, 3, 5])
    made = controller(overdue=Overdue.WAIT, k=k, j=noise.choice([1, min(2, k)]), steps=30)
    run = World(made, noise).begin().play()
    assert run.finished == "all 30 steps are done"
    assert run.batcher.stale_tokens == 0, "a group that came was too old"
    assert_sound(run)


def test_random_runs_of_the_controller_include_steps_that_wait_for_late_groups():
    """Without such waits, the test of runs that wait for overdue groups would prove nothing."""
    waits, lost = 0, 0
    for overdue in (Overdue.WAIT, Overdue.DROP):
        for seed in range(20):
            run = world(seed, overdue=overdue, k=2, steps=30).begin().play()
            waits, lost = waits + run.waits, lost + run.batcher.stale_tokens
    assert waits > 20 and lost > 20


def test_no_prompts_are_issued_before_weights_are_published_and_the_first_evaluation_ends():
    run = world()
    assert waiting_for(run.state, now=0.0) == "an engine to join"
    run.begin()
    assert run.orders == []
    assert waiting_for(run.state, now=0.0) == f"the trainer to publish its weights to {ENGINE}"
    run.publish()
    assert [order.order_id for order in run.orders] == [f"eval-0-1-{i:06d}" for i in range(3)]
    for _ in range(3):
        run.sample()
        run.answer()
    assert run.state.evaluations.results[0].accuracy == 1.0
    assert [order.index for order in run.orders] == list(range(4)), "half of k = 4 steps, of two groups each"


def test_repeated_reports_are_answered_alike_and_those_of_a_replaced_trainer_are_ignored():
    """A trainer repeats its report until answered, so a copy may arrive after the later trainer's first report."""
    run = World(controller()).begin()
    assert run.controller.handle(ready("1"), now=0.0) == [Send(run.directive)] and run.state.epoch == 1
    run.tell(ready("2"))
    assert run.controller.handle(ready("1"), now=1.0) == [] and run.state.epoch == 2
    (answer,) = run.controller.handle(ready("2"), now=1.0)
    assert isinstance(answer, Send) and answer.directive.epoch == 2
    assert run.controller.handle(Checkpointed(epoch=1, model_version=3, path="p"), now=1.0) == []
    assert run.controller.handle(Checkpointed(epoch=2, model_version=3, path="p"), now=1.0) != []
    run.controller.handle(ready("3"), now=2.0)
    assert run.state.epoch == 3
    run.controller.handle(ready("4", claimed=9), now=2.0)
    assert run.state.epoch == 10, "the trainer's directory records epochs that a new stream server does not know"


def test_preempted_trainer_saves_its_state_and_a_new_trainer_continues():
    run = world(evaluation_problems=0).begin(serves=True)
    leaving = TrainerLeaving(report_id="leave-1", epoch=1, model_version=0, consumed=run.consumed())
    (directive,) = directives(run.controller.handle(leaving, now=0.0))
    assert (directive.answers, directive.stop, directive.checkpoint) == ("leave-1", True, True)
    assert directive.publish_to == []
    assert directive.controller_state is not None
    assert run.controller.handle(leaving, now=0.0) == [Send(directive)], "a repeated report gets the same answer"
    left = run.controller.handle(TrainerStopped(epoch=1, model_version=0, left=True), now=0.0)
    assert left == [Record("trainer_left", {"model_version": 0})]
    run.ready("2")
    assert (run.directive.epoch, run.directive.stop) == (2, False)


def test_publication_to_a_new_engine_does_not_update_other_engines_before_they_are_due():
    run = world(evaluation_problems=0, j=3, k=4).begin(serves=True)
    run.give(EngineRegistered(now=0.0, url=OTHER))
    sent = []
    while run.version < 3:
        if run.publications:
            sent.append(run.publications[-1][1].publish_to)
            run.publish()
            run.give(EngineRestarted(now=0.0, url=OTHER))
        run.sample()
        run.answer()
        run.train()
    assert run.publications[-1][1].publish_to == [ENGINE, OTHER], "j = 3: due at the third step"
    assert sent and all(publish_to == [OTHER] for publish_to in sent)


def test_knob_changes_are_sent_immediately_unless_the_trainer_is_absent_or_stopping():
    """New prompts follow the new knobs immediately; a trainer with the old knobs could wait for too many rollouts."""
    run = world(evaluation_problems=0, j=1, k=1, rollouts_per_step=8)
    change = KnobsPatched(now=0.0, changes={"rollouts_per_step": 4}, who="test", time=0.0)
    assert [type(effect) for effect in run.controller.decide(change)] == [Record]
    run.begin(serves=True)
    (directive,) = directives(run.controller.decide(change))
    assert (directive.answers, directive.knobs.rollouts_per_step) == ("knobs-e1-2", 4)
    assert (directive.publish_to, directive.checkpoint, directive.stop) == ([], False, False)
    run.apply(run.controller.stop("enough"))
    assert directives(run.controller.decide(change)) == [] and run.directive.stop


def test_trainer_that_waits_for_rollouts_while_an_evaluation_runs_gets_a_directive_to_keep_waiting():
    run = world().begin()
    starving = received(Starving(epoch=1, model_version=0, held=[]), now=1.0)
    assert run.controller.decide(starving) == [], "no evaluation runs that would end: the trainer's own deadline counts"
    run.publish()
    (sent,) = directives(run.controller.decide(starving))
    assert (sent.answers, sent.publish_to, sent.checkpoint, sent.stop) == ("held-e1-0", [], False, False)
    for _ in range(3):
        run.sample()
        run.answer()
    assert run.controller.decide(starving) == [], "it waits for groups now"


def test_groups_in_flight_at_a_departed_actor_are_requested_again():
    """The last heartbeat of the departed actor reports four groups in flight, which no other actor samples."""
    run = world(evaluation_problems=0).begin(serves=True)
    for name, groups, at in (("gone", 4, 1.0), ("here", 0, 1.0), ("here", 0, 30.0)):
        run.tell(alive(name, groups=groups), now=at)
        effects = run.controller.decide(received(Starving(epoch=1, model_version=0, held=[]), now=at))
        assert [type(effect) for effect in effects] == ([Record, IssuePrompts] if at > 1.0 else [])


@pytest.mark.parametrize("seed", FEW_OF_100)
def test_groups_lost_by_the_stream_server_are_requested_again_and_trained_only_once(seed):
    """The newest group requests and unread groups are lost at random, although the trainer never reports starvation."""
    rng = random.Random(seed)
    run = world(seed, k=rng.choice([1, 2, 8, math.inf])).begin()

    def lose():
        if rng.random() < 0.02 and run.state.phase is RunPhase.TRAINING:
            del run.orders[len(run.orders) - rng.randint(0, len(run.orders)) :]
            for index in [index for index in run.batcher.waiting if rng.random() < 0.3]:
                del run.batcher._waiting[index]
            run.give(StreamsLost(now=0.0))
            run.state.account.check()

    run.play(between=lose)
    assert run.finished == "all 20 steps are done"
    assert_sound(run)
    account = run.state.account
    there = {order.index for order in run.orders} | {order.index for order, _ in run.sampling} | {*run.batcher.waiting}
    ended = {*range(run.batcher.ledger.frontier), *run.batcher.ledger.beyond, *account.failed, *account.outdated}
    assert set(range(account.cursor)) <= there | ended | {*account.reissue}, "an order is in flight and nowhere"


def test_evaluation_problems_lost_by_the_stream_server_are_requested_again():
    run = world().begin(serves=True)
    issued = list(run.orders)
    run.sample()
    run.answer()
    effects = run.controller.decide(StreamsLost(now=0.0))
    assert [effect for effect in effects if isinstance(effect, IssuePrompts)] == [IssuePrompts(issued[1:])]
    assert [directive.publish_to for directive in directives(effects)] == [[]]
    run.apply(effects)
    for _ in range(2):
        run.sample()
        run.answer()
    (result,) = run.state.evaluations.results
    assert (result.problems, result.incomplete) == (3, "")
    run.sample()
    run.answer()
    assert run.state.evaluations.results == [result], "the second answer to a question counts nowhere"


def test_last_evaluation_is_completed_if_the_trainer_restarts_during_it():
    run = World(controller(steps=2, evaluation_problems=3, pin=Pin.GATE)).begin()
    run.play(lambda: run.state.phase is RunPhase.FINISHING)
    run.directive = None
    run.sampling.clear()
    run.orders.clear()
    run.ready("2", 2)
    assert run.finished is None
    assert run.directive.stop
    run.play()
    assert run.finished == "all 2 steps are done"
    assert run.state.evaluations.results[-1].model_version == 2


def test_run_begins_without_waiting_for_an_engine_that_an_operator_removed():
    run = World(controller(evaluation_problems=0, engines_expected=3))
    for number in range(2):
        run.give(joins(f"http://engine-{number}", name=f"engine-{number}"))
    run.ready("1")
    assert run.directive is None
    assert waiting_for(run.state, now=0.0) == "engine-2 to join"
    run.give(EngineRemoved(now=0.0, engine="engine-1"))
    assert waiting_for(run.state, now=0.0).startswith("engine-2 to join; http://engine-1 is expelled")
    run.give(joins("http://engine-2", name="engine-2"))
    assert run.directive.publish_to == [ENGINE, "http://engine-2"]


def test_resumed_controller_requests_again_exactly_the_groups_that_were_in_flight():
    run = world().begin()
    run.until_version(7)
    snapshot, consumed = run.state.checkpoint_record(), run.consumed()
    ended = set(range(consumed.frontier)) | set(consumed.beyond) | set(snapshot["account"]["failed"])
    resumed = controller(room=1000)
    resumed.state.resume(snapshot, step=7)
    resumed.decide(EngineRegistered(now=0.0, url=ENGINE))
    resumed.handle(ready("2", version=7, consumed=consumed), now=0.0)
    assert resumed.state.epoch == run.state.epoch + 1
    membership = resumed.state.fleet.membership
    resumed.state.fleet.on_published(ENGINE, 7, membership=membership)
    assert resumed.state.fleet.on_verified(ENGINE, 7, membership=membership)
    issued = [o.index for e in resumed.issue() if isinstance(e, IssuePrompts) for o in e.orders]
    cursor = snapshot["account"]["cursor"]
    lost = [index for index in range(cursor) if index not in ended]
    assert issued[: len(lost)] == lost
    assert issued[len(lost) :] == list(range(cursor, cursor + len(issued) - len(lost)))


@pytest.mark.parametrize("loss", [None, 1.5])
def test_auto_is_on_policy_unless_the_objective_corrects_for_lag(loss):
    run = World(controller(j=None, k=64.0, oversample=None, evaluation_problems=0, lag_loss=loss)).begin()
    seen = set()
    run.play(lambda: run.version >= 8, between=lambda: seen.add(run.state.account.in_flight))
    groups_per_step = 2
    assert (max(seen) == groups_per_step) == (loss is None)
    assert ("on policy: nothing in the objective corrects for lag" in run.controller.lag_sentence()) == (loss is None)


@pytest.mark.parametrize("j", [None, 1])
def test_trainer_and_engines_get_all_cores_while_they_take_turns_on_policy(j):
    settings = {"lag_loss": 1.5, "cores": (0, 3)}
    run = World(controller(j=j, k=64.0, oversample=None, evaluation_problems=0, **settings))
    run.state.lag.turns = Turns.first()
    run.begin()
    seen = set()
    run.play(lambda: run.version >= 8, between=lambda: seen.add(run.state.account.in_flight))
    groups_per_step, takes_turns = 2, j is None
    assert (max(seen) == groups_per_step) is takes_turns
    assert run.controller._directive("x").cores == ([0, 3] if takes_turns else [])
    run.state.lag.turns = Turns(are_taken=True, have_begun=False)
    assert run.controller._directive("x").cores == [], "what was sampled with lag is still trained"


def test_lag_does_not_follow_waits_during_an_evaluation():
    run = world().begin()
    run.state.lag.any_trained = True
    run.state.lag.rest = 0
    before = run.state.lag.steps
    run.play(lambda: run.state.evaluations.results)
    assert run.state.lag.rest == 1, "the step that the evaluation delayed is ignored"
    assert run.state.lag.steps == before
