"""Tests of the controller's invariants under random schedules, and of single decisions."""

import math
import random
from dataclasses import replace

import pytest

from pipelinerl.controller.decisions.evaluator import holds_updates
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.decisions.status import assignment_of
from pipelinerl.controller.state.inputs_and_effects import (
    EngineRegistered,
    EngineRemoved,
    EngineRestarted,
    IssuePrompts,
    KnobsPatched,
    Record,
    ReportReceived,
    Send,
    StreamsLost,
    Ticked,
)
from pipelinerl.controller.state.issued_ledger import FilteredShare, SentOrder
from pipelinerl.controller.state.run_state import RunPhase
from pipelinerl.enums import Overdue, Pin, StalenessScope
from pipelinerl.errors import RecipeError
from pipelinerl.messages import ActorAlive, Starving, StepSkipped, TrainerLeaving, TrainerReady, TrainerStopped
from tests.controller.world import ENGINE, World, controller, drawn_problem, knobs

#: The seeds with which each invariant is tested; seeds from 25 on run only with the slow tests.
FEW_OF_100 = [*range(25), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(25, 100))]


def world(seed=0, **changes):
    return World(controller(**changes), random.Random(seed))


@pytest.mark.parametrize("seed", FEW_OF_100)
def test_runs_under_random_schedules_finish_and_keep_all_invariants(seed):
    rng = random.Random(seed)
    run = world(seed, k=rng.choice([1, 2, 4, math.inf]))
    run.begin()
    for _ in range(20_000):
        if run.finished is not None:
            break
        run.act()
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
    assert run.finished == "all 20 steps are done", waiting_for(run.controller.state, now=0.0)
    for version, groups, k in run.trained:
        assert all(version - trained.oldest_version <= k for trained in groups)
    indices = [trained.index for _, groups, _ in run.trained for trained in groups]
    assert len(indices) == len(set(indices)), "a group was trained twice"
    assert run.issued == list(range(len(run.issued))), "prompts are issued once each, in order"
    for order in run.orders_issued:
        weights, quota = run.controller.state.domain_weights_of(order.index), run.controller.state.quota_of(order.index)
        assert order.problem == drawn_problem(order.index, weights, quota), (
            "the mixture is that of the order's first issue"
        )
    ledger = run.controller.state.account.ledger()
    assert ledger["issued"] == sum(
        ledger[outcome] for outcome in ("trained", "filtered", "stale", "failed", "in_flight")
    )


@pytest.mark.parametrize("seed", range(30))
def test_mixed_group_sizes_fill_steps_with_whole_groups(seed):
    """Groups fail, are filtered and become stale at random; in lockstep, only one step's groups are in flight."""
    rng = random.Random(seed)
    lockstep, large = seed % 3 == 0, rng.choice([3, 4, 7])
    k = 1 if lockstep else rng.choice([2, 4, math.inf])
    oversample = 1.0 if lockstep else rng.choice([1.0, None])
    overdue = rng.choice(list(Overdue))
    run = world(seed, k=k, large=large, rollouts_per_step=8, oversample=oversample, overdue=overdue)
    run.begin()
    account = run.controller.state.account
    for _ in range(20_000):
        if run.finished is not None:
            break
        run.act()
        assert len(account.sent) == account.in_flight, "the size of whatever is out is known, and of nothing else"
        assert not lockstep or account.rollouts_in_flight(0) < 8 + large
    assert run.finished == "all 20 steps are done", waiting_for(run.controller.state, now=0.0)
    for version, groups, k in run.trained:
        sizes = [len(each.rollouts) for each in groups]
        assert 8 <= sum(sizes) < 8 + max(sizes), "a step ends with the group that fills it"
        assert all(version - each.oldest_version <= k for each in groups)
    indices = [each.index for _, groups, _ in run.trained for each in groups]
    assert len(indices) == len(set(indices)), "a group was trained twice"
    requested_sizes = {order.index: order.sampling.num_samples for order in run.orders_issued}
    assert set(requested_sizes.values()) == {large, 2}
    assert all(requested_sizes[each.index] == len(each.rollouts) for _, groups, _ in run.trained for each in groups)


@pytest.mark.parametrize("seed", range(20))
def test_run_ends_after_three_nonfinite_steps_in_a_row_and_its_group_counts_add_up(seed):
    run = world(seed)
    run.poison = 0.2 if seed % 2 else 0.7
    run.begin()
    for _ in range(20_000):
        if run.finished is not None:
            break
        run.act()
    wrecked = f"step {run.version + 1} was skipped 3 times in a row: rewards"
    assert run.finished == ("all 20 steps are done" if run.skipped < 3 else wrecked)
    assert run.controller.state.version == run.version
    ledger = run.controller.state.account.ledger()
    assert ledger["trained"] == sum(len(groups) for _, groups, _ in run.trained)
    assert ledger["issued"] == sum(
        ledger[outcome] for outcome in ("trained", "filtered", "stale", "failed", "in_flight")
    )
    if seed % 2 == 0:
        assert run.skipped == 3, "at 0.7, three in a row come within 20 steps"


def test_controller_makes_the_trainer_save_and_stop_after_three_skipped_steps_in_a_row():
    run = world(evaluation_problems=0)
    run.begin()
    run.publish()
    for number in (1, 2, 3):
        assert run.directive is not None and not run.directive.stop
        skip = StepSkipped(
            report_id=f"e1-skip-0-{number}",
            epoch=1,
            model_version=0,
            consumed=run.consumed(),
            what="rewards",
            groups=[4],
            in_a_row=number,
        )
        effects = run.controller.handle(skip, now=0.0)
        run.apply(effects)
        expected = {"step": 1, "what": "rewards", "groups": [4], "in_a_row": number}
        assert effects[0] == Record("step_skipped", expected)
        again = run.controller.handle(skip, now=0.0)
        assert again == [Send(run.directive)], "a report that comes twice is answered alike"
    assert (run.directive.stop, run.directive.checkpoint) == (True, True)
    assert run.directive.controller_state is not None


def test_run_with_staleness_bounds_j_and_k_of_one_trains_each_step_on_the_latest_version():
    """At most the prompts of one step are in flight, and all groups of a step come from one version."""
    run = world(k=1, j=1)
    run.begin()
    while run.finished is None:
        run.act()
        assert run.controller.state.account.in_flight <= run.controller.state.knobs.groups_per_step
    for version, groups, _ in run.trained:
        assert {g.oldest_version for g in groups} == {version - 1}


@pytest.mark.parametrize(
    ("oversample", "k", "issued"), [(1.0, 4, 4), (None, 4, 8), (4.0, 4, 8), (1.5, 4, 6), (None, 1, 2), (4.0, 1, 4)]
)
def test_controller_requests_extra_groups_for_expected_filtering_by_default_except_in_lockstep(oversample, k, issued):
    run = World(controller=controller(evaluation_problems=0, oversample=oversample, k=k), rng=random.Random(0))
    run.controller.state.filtered_share = FilteredShare(trained=1e6, filtered=1e6)
    run.begin()
    run.publish()
    assert len(run.issued) == issued


@pytest.mark.parametrize("seed", range(20))
def test_run_that_requests_extra_groups_keeps_staleness_bounds_and_trains_no_group_twice(seed):
    run = World(controller=controller(oversample=3.0), rng=random.Random(seed))
    run.begin()
    while run.finished is None:
        run.act()
    assert 0 < run.controller.state.filtered_share.share < 0.7
    for version, groups, k in run.trained:
        assert all(version - trained.oldest_version <= k for trained in groups)
    indices = [trained.index for _, groups, _ in run.trained for trained in groups]
    assert len(indices) == len(set(indices)), "a group was trained twice"


@pytest.mark.parametrize(
    ("settings", "k"),
    [({}, 4.0), ({"overdue": Overdue.WAIT}, None), ({"scope": StalenessScope.ROLLOUT}, None)],
)
def test_actors_get_no_staleness_limit_if_overdue_groups_may_still_be_trained_on(settings, k):
    made = controller(k=4)
    assert assignment_of(made.state, replace(made.settings, **settings)).k == k


@pytest.mark.parametrize("seed", FEW_OF_100)
def test_run_whose_trainer_waits_for_overdue_groups_drops_no_group_and_finishes(seed):
    """Groups fail, are dropped by actors or filtered, and engines are updated at random."""
    noise = random.Random(seed)
    k = noise.choice([1, 2, 3, 5])
    run = World(controller=controller(overdue=Overdue.WAIT, k=k, j=noise.choice([1, min(2, k)]), steps=30), rng=noise)
    run.begin()
    for _ in range(20_000):
        if run.finished is not None:
            break
        run.act()
    assert run.finished == "all 30 steps are done", waiting_for(run.controller.state, now=0.0)
    assert run.batcher.stale_tokens == 0, "a group that came was too old"
    assert all(version - each.oldest_version <= k for version, groups, k in run.trained for each in groups)


def test_random_runs_of_the_controller_include_steps_that_wait_for_late_groups():
    """Without such waits, the test of runs that wait for overdue groups would prove nothing."""
    waits, lost = 0, 0
    for overdue in (Overdue.WAIT, Overdue.DROP):
        for seed in range(20):
            run = World(controller=controller(overdue=overdue, k=2, steps=30), rng=random.Random(seed))
            run.begin()
            while run.finished is None:
                run.act()
            waits, lost = waits + run.waits, lost + run.batcher.stale_tokens
    assert waits > 20 and lost > 20


def test_no_prompts_are_issued_before_weights_are_published_and_the_first_evaluation_ends():
    run = world()
    assert waiting_for(run.controller.state, now=0.0) == "an engine to join"
    run.begin()
    assert run.orders == []
    assert waiting_for(run.controller.state, now=0.0) == f"the trainer to publish its weights to {ENGINE}"
    run.publish()
    assert [order.order_id for order in run.orders] == [f"eval-0-1-{i:06d}" for i in range(3)]
    for _ in range(3):
        run.sample()
        run.answer()
    assert run.controller.state.evaluations.results[0].accuracy == 1.0
    assert [order.index for order in run.orders] == list(range(4)), "half of k = 4 steps, of two groups each"


def test_trainer_that_repeats_a_report_gets_the_same_directive_again():
    run = world()
    run.begin()
    again = run.controller.handle(
        TrainerReady(report_id="ready-1", incarnation="1", model_version=0, consumed=run.consumed()), now=0.0
    )
    assert again == [Send(run.directive)]
    assert run.controller.state.epoch == 1


def test_second_trainer_begins_a_new_epoch_and_the_first_trainer_is_ignored():
    run = world()
    run.begin()
    run.awaiting = "ready-2"
    run.tell(TrainerReady(report_id="ready-2", incarnation="2", model_version=0, consumed=run.consumed()))
    assert run.directive is not None and run.directive.epoch == 2
    before = run.controller.state.version
    run.version, run.awaiting = 7, "e1-step-7"
    from pipelinerl.messages import StepDone

    run.tell(StepDone(report_id="e1-step-7", epoch=1, model_version=7, consumed=run.consumed(), stats={}))
    assert run.controller.state.version == before


def test_preempted_trainer_saves_its_state_and_a_new_trainer_continues():
    run = world(evaluation_problems=0)
    run.begin()
    run.publish()
    leaving = TrainerLeaving(report_id="leave-1", epoch=1, model_version=0, consumed=run.consumed())
    (directive,) = [effect.directive for effect in run.controller.handle(leaving, now=0.0) if isinstance(effect, Send)]
    assert (directive.answers, directive.stop, directive.checkpoint, directive.publish_to) == (
        "leave-1",
        True,
        True,
        [],
    )
    assert directive.controller_state is not None
    assert run.controller.handle(leaving, now=0.0) == [Send(directive)], "a repeated report gets the same answer"
    left = run.controller.handle(TrainerStopped(epoch=1, model_version=0, left=True), now=0.0)
    assert left == [Record("trainer_left", {"model_version": 0})]
    run.awaiting = "ready-2"
    run.tell(TrainerReady(report_id="ready-2", incarnation="2", model_version=0, consumed=run.consumed()))
    assert run.directive is not None and (run.directive.epoch, run.directive.stop) == (2, False)


def test_preempted_trainer_is_not_replaced_when_the_run_is_stopping():
    run = world(evaluation_problems=0)
    run.begin()
    run.apply(run.controller.stop("enough"))
    run.tell(TrainerStopped(epoch=1, model_version=0, left=True))
    assert run.finished == "enough"


def test_engine_that_joins_late_gets_weights_between_steps():
    run = world()
    run.begin()
    run.publish()
    effects = run.controller.decide(EngineRegistered(now=0.0, url="http://engine-1"))
    directives = [effect.directive for effect in effects if isinstance(effect, Send)]
    assert len(directives) == 1
    assert directives[0].publish_to == ["http://engine-1"], "what the others serve is no concern of its"
    assert directives[0].to_verify == ["http://engine-1"], "who serves has proven its weights"
    assert run.controller.state.fleet.serving() == [ENGINE], "unverified engines get no work"
    assert run.controller.decide(Ticked(now=1.0)) == [], "one publication is under way and is not requested twice"


def test_publication_to_a_new_engine_does_not_update_other_engines_before_they_are_due():
    run = world(evaluation_problems=0, j=3, k=4)
    run.begin()
    run.publish()
    run.give(EngineRegistered(now=0.0, url="http://engine-1"))
    sent = []
    while run.version < 3:
        if run.publications:
            sent.append(run.publications[-1][1].publish_to)
            run.publish()
            run.give(EngineRestarted(now=0.0, url="http://engine-1"))
        run.sample()
        run.answer()
        run.train()
    assert run.publications[-1][1].publish_to == [ENGINE, "http://engine-1"], "j = 3: due at the third step"
    assert sent and all(publish_to == ["http://engine-1"] for publish_to in sent)


def test_weight_publication_postponed_by_an_evaluation_reaches_all_engines_afterwards():
    run = world(pin=Pin.GATE, evaluation_interval_steps=1, steps=9)
    run.begin()
    while not holds_updates(run.controller.state):
        run.act()
    sent = len(run.publications)
    run.give(EngineRegistered(now=0.0, url="http://engine-1"))
    assert len(run.publications) == sent, "the gate holds for engine-1, too"
    while holds_updates(run.controller.state):
        run.sample()
        run.answer()
    assert run.directive is not None and run.directive.publish_to == [ENGINE, "http://engine-1"]


def test_knob_changes_are_sent_immediately_to_a_trainer_that_waits_for_rollouts():
    """New prompts follow the new knobs immediately; a trainer with the old knobs could wait for too many rollouts."""
    run = world(evaluation_problems=0, j=1, k=1, rollouts_per_step=8)
    run.begin()
    run.publish()
    effects = run.controller.decide(KnobsPatched(now=0.0, changes={"rollouts_per_step": 4}, who="test", time=0.0))
    (directive,) = [effect.directive for effect in effects if isinstance(effect, Send)]
    assert (directive.answers, directive.knobs.rollouts_per_step) == ("knobs-e1-1", 4)
    assert (directive.publish_to, directive.checkpoint, directive.stop) == ([], False, False)


def test_knob_changes_are_not_sent_to_an_absent_or_stopping_trainer():
    run = world(evaluation_problems=0)
    change = KnobsPatched(now=0.0, changes={"k": 9}, who="test", time=0.0)
    assert [type(effect) for effect in run.controller.decide(change)] == [Record]
    run.begin()
    run.apply(run.controller.stop("enough"))
    assert [type(effect) for effect in run.controller.decide(change) if isinstance(effect, Send)] == []
    assert run.directive is not None and run.directive.stop


def test_trainer_that_waits_for_rollouts_while_an_evaluation_runs_gets_a_directive_to_keep_waiting():
    run = world()
    run.begin()
    starving = ReportReceived(now=1.0, report=Starving(epoch=1, model_version=0, held=[]), entry_id="1-0")
    assert run.controller.decide(starving) == [], "no evaluation runs that would end: the trainer's own deadline counts"
    run.publish()
    (sent,) = run.controller.decide(starving)
    assert isinstance(sent, Send) and sent.directive.answers == "held-e1-0"
    assert (sent.directive.publish_to, sent.directive.checkpoint, sent.directive.stop) == ([], False, False)
    for _ in range(3):
        run.sample()
        run.answer()
    assert run.controller.decide(starving) == [], "it waits for groups now"


def test_groups_in_flight_at_a_departed_actor_are_requested_again():
    """The last heartbeat of the departed actor reports four groups in flight, which no other actor samples."""
    run = world(evaluation_problems=0)
    run.begin()
    run.publish()
    for name, groups, at in (("gone", 4, 1.0), ("here", 0, 1.0), ("here", 0, 30.0)):
        alive = ActorAlive(name=name, groups_in_flight=groups, groups_done=0, retries=0)
        run.give(ReportReceived(now=at, report=alive, entry_id="1-0"))
        starving = ReportReceived(now=at, report=Starving(epoch=1, model_version=0, held=[]), entry_id="1-0")
        effects = run.controller.decide(starving)
        assert [type(effect) for effect in effects] == ([Record, IssuePrompts] if at > 1.0 else [])


@pytest.mark.parametrize("seed", FEW_OF_100)
def test_groups_lost_by_the_stream_server_are_requested_again_and_trained_only_once(seed):
    """The newest group requests and unread groups are lost at random, although the trainer never reports starvation."""
    rng = random.Random(seed)
    run = world(seed, k=rng.choice([1, 2, 8, math.inf]))
    run.begin()
    for _ in range(20_000):
        if run.finished is not None:
            break
        run.act()
        if rng.random() < 0.02 and run.controller.state.phase is RunPhase.TRAINING:
            del run.orders[len(run.orders) - rng.randint(0, len(run.orders)) :]
            unread = [index for index in run.batcher.waiting if rng.random() < 0.3]
            for index in unread:
                del run.batcher._waiting[index]
            run.give(StreamsLost(now=0.0))
            run.controller.state.account.check()
    assert run.finished == "all 20 steps are done", waiting_for(run.controller.state, now=0.0)
    indices = [trained.index for _, groups, _ in run.trained for trained in groups]
    assert len(indices) == len(set(indices)), "a group was trained twice"
    account = run.controller.state.account
    ledger = account.ledger()
    assert ledger["issued"] == sum(
        ledger[outcome] for outcome in ("trained", "filtered", "stale", "failed", "in_flight")
    )
    there = {order.index for order in run.orders} | {order.index for order, _ in run.sampling} | {*run.batcher.waiting}
    ended = {*range(run.batcher.ledger.frontier), *run.batcher.ledger.beyond, *account.failed, *account.outdated}
    assert set(range(account.cursor)) <= there | ended | {*account.reissue}, "an order is in flight and nowhere"


def test_evaluation_problems_lost_by_the_stream_server_are_requested_again():
    run = world()
    run.begin()
    run.publish()
    issued = list(run.orders)
    run.sample()
    run.answer()
    effects = run.controller.decide(StreamsLost(now=0.0))
    assert [effect for effect in effects if isinstance(effect, IssuePrompts)] == [IssuePrompts(issued[1:])]
    assert [effect.directive.publish_to for effect in effects if isinstance(effect, Send)] == [[]]
    run.apply(effects)
    for _ in range(2):
        run.sample()
        run.answer()
    (result,) = run.controller.state.evaluations.results
    assert (result.problems, result.incomplete) == (3, "")
    run.sample()
    run.answer()
    assert run.controller.state.evaluations.results == [result], "the second answer to a question counts nowhere"


def test_wait_of_a_replacement_trainer_before_its_first_step_does_not_add_rollouts_in_flight():
    run = World(controller(steps=99, evaluation_problems=0), random.Random(0))
    run.begin()
    while run.version < 2:
        run.act()
    ahead = run.controller.state.lag
    assert ahead.any_trained
    run.directive, run.awaiting = None, "ready-2"
    run.tell(TrainerReady(report_id="ready-2", incarnation="2", model_version=2, consumed=run.consumed()))
    assert not ahead.any_trained, "its first step waits for engines and actors, as that of the first trainer does"


def test_last_evaluation_is_completed_if_the_trainer_restarts_during_it():
    run = World(controller(steps=2, evaluation_problems=3, pin=Pin.GATE), random.Random(0))
    run.begin()
    while run.controller.state.phase is not RunPhase.FINISHING:
        run.act()
    run.directive, run.awaiting = None, "ready-2"
    run.sampling.clear()
    run.orders.clear()
    run.tell(TrainerReady(report_id="ready-2", incarnation="2", model_version=2, consumed=run.consumed()))
    assert run.finished is None
    assert run.directive is not None and run.directive.stop
    while run.finished is None:
        run.act()
    assert run.finished == "all 2 steps are done"
    assert run.controller.state.evaluations.results[-1].model_version == 2


def test_run_begins_without_waiting_for_an_engine_that_an_operator_removed():
    run = World(controller(evaluation_problems=0), random.Random(0))
    run.controller.settings = replace(run.controller.settings, engines_expected=3)
    for number in range(2):
        run.give(
            EngineRegistered(
                now=0.0, url=f"http://engine-{number}", incarnation="1", name=f"engine-{number}", type="torch"
            )
        )
    run.awaiting = "ready-1"
    run.tell(TrainerReady(report_id="ready-1", incarnation="1", model_version=0, consumed=run.consumed()))
    assert run.directive is None
    assert waiting_for(run.controller.state, now=0.0) == "engine-2 to join"
    run.give(EngineRemoved(now=0.0, engine="engine-1"))
    assert waiting_for(run.controller.state, now=0.0).startswith("engine-2 to join; http://engine-1 is expelled")
    run.give(EngineRegistered(now=0.0, url="http://engine-2", incarnation="1", name="engine-2", type="torch"))
    assert run.directive is not None and run.directive.publish_to == [ENGINE, "http://engine-2"]


def test_resumed_controller_requests_again_exactly_the_groups_that_were_in_flight():
    run = world()
    run.begin()
    while run.version < 7:
        run.act()
    snapshot, consumed = run.controller.state.checkpoint_record(), run.consumed()
    ended = set(range(consumed.frontier)) | set(consumed.beyond) | set(snapshot["account"]["failed"])
    resumed = controller()
    resumed.state.resume(snapshot, step=7)
    resumed.decide(EngineRegistered(now=0.0, url=ENGINE))
    resumed.handle(TrainerReady(report_id="r", incarnation="2", model_version=7, consumed=consumed), now=0.0)
    assert resumed.state.epoch == run.controller.state.epoch + 1
    membership = resumed.state.fleet.membership
    resumed.state.fleet.on_published(ENGINE, 7, membership=membership)
    assert resumed.state.fleet.on_verified(ENGINE, 7, membership=membership)
    resumed.settings = resumed.settings.__class__(
        **{name: getattr(resumed.settings, name) for name in resumed.settings.__slots__ if name != "max_groups"},
        max_groups=1000,
    )
    issued = [o.index for e in resumed.issue() if isinstance(e, IssuePrompts) for o in e.orders]
    cursor = snapshot["account"]["cursor"]
    lost = [index for index in range(cursor) if index not in ended]
    assert issued[: len(lost)] == lost
    assert issued[len(lost) :] == list(range(cursor, cursor + len(issued) - len(lost)))


@pytest.mark.parametrize("loss", [None, 1.5])
def test_auto_is_on_policy_unless_the_objective_corrects_for_lag(loss):
    run = World(controller(j=None, k=64.0, oversample=None, evaluation_problems=0), random.Random(0))
    run.controller.settings = replace(run.controller.settings, lag_loss=loss)
    run.begin()
    seen = set()
    while run.version < 8:
        run.act()
        seen.add(run.controller.state.account.in_flight)
    groups_per_step = 2
    assert (max(seen) == groups_per_step) == (loss is None)
    assert ("on policy: nothing in the objective corrects for lag" in run.controller.lag_sentence()) == (loss is None)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"k": 1, "j": 2}, "staleness.k must be at least j = 2, got 1"),
        ({"q": 1}, "unknown knob 'q'"),
        ({"j": 1.5}, "j must be a whole number"),
        ({"k": "many"}, "k must be a number, got 'many'"),
        ({"learning_rate": -1}, "learning_rate must be a positive number"),
        ({"rollouts_per_step": 3}, "multiple of the group size 2"),
        ({"mode": "x"}, "mode must be one of auto, on_policy"),
        ({"temperature": True}, "temperature must be a number"),
    ],
)
def test_invalid_knobs_are_rejected_with_one_sentence(change, sentence):
    run = controller()
    with pytest.raises(RecipeError, match=sentence.replace("(", r"\(")):
        run.patch(change, who="test", time=0.0)
    assert (run.state.knobs, run.state.knob_log) == (knobs(), [])


def test_knobs_accept_staleness_modes_and_an_infinite_staleness_bound_k():
    assert knobs().patched({"mode": "rlax"}) == knobs(j=16, k=32)
    assert knobs().patched({"mode": "auto"}).to_json()["j"] == "auto"
    assert knobs(j=None).patched({"j": 2}).j == 2
    assert knobs(j=2).patched({"j": "auto"}).j is None
    assert knobs().patched({"k": "inf"}).to_json()["k"] == "inf"


def test_lag_does_not_follow_waits_during_an_evaluation():
    run = world()
    run.begin()
    run.controller.state.lag.any_trained = True
    run.controller.state.lag.rest = 0
    while not run.controller.state.evaluations.results:
        run.act()
    assert run.controller.state.lag.rest == 1, "the step that the evaluation delayed is ignored"
    assert run.controller.state.lag.steps == 2


class CountedOrders(dict[int, SentOrder]):
    """The groups in flight, by index; counts how often all of them are read."""

    looked = 0

    def values(self):
        self.looked += 1
        return super().values()


def test_requesting_a_thousand_groups_sums_the_sizes_of_the_groups_in_flight_only_once():
    run = world(k=math.inf, room=2000, evaluation_problems=0, groups_in_flight=2000)
    run.controller.state.lag.steps = math.inf
    run.begin()
    while run.publications:
        run.publish()
    account = run.controller.state.account
    assert account.in_flight == 2000, "all that may be out are"
    sent = account.sent = CountedOrders(account.sent)
    account.lost(range(1000))
    before = len(run.orders_issued)
    effects = run.controller.issue()
    (issued,) = [effect for effect in effects if isinstance(effect, IssuePrompts)]
    assert (len(issued.orders), account.in_flight, before) == (1000, 2000, 2000)
    assert 1 <= sent.looked <= 2, "not once for each order"
