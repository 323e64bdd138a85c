"""Tests of the rule that chooses the lag and j: when they grow, shrink and rest, and how the rule explains itself."""

import msgspec
import pytest

from pipelinerl.controller.state.lag import LagRule, StepFigures, Turns


def noted(rule, *, steps=1, most=32.0, most_j=4, **figures):
    lag = {"lag_rms": figures["age"] - 1} if "age" in figures else {}
    for _ in range(steps):
        rule.note_step(StepFigures(**{"waited": 0.0} | lag | figures), most=most, most_j=most_j, loss=1.5)
    return rule.steps


def begun(**fields):
    return LagRule(**{"any_trained": True, "priced": 99, "is_cold": False, "steps": 2.0} | fields)


def test_lag_grows_while_the_trainer_waits_and_rests_until_the_change_can_show():
    rule = begun(any_trained=False)
    assert noted(rule, waited=9.0) == 2, "the first step waited for the start"
    assert noted(rule, waited=0.43) == 2, "one step may be an exception"
    assert noted(rule, waited=0.43) == pytest.approx(1 + 1.4)
    assert noted(rule, waited=0.43, steps=3) == pytest.approx(2.4), "their orders were issued before"
    assert noted(rule, waited=9.0, steps=2) == pytest.approx(1 + 2 * 1.4), "at most twice as much at once"
    assert noted(rule, waited=9.0, steps=9, most=3.75) == 3.75, "never more than may be in flight"


def test_rule_rests_less_until_four_steps_of_a_new_run_give_no_reason_to_grow():
    rule = begun(is_cold=True)
    assert noted(rule, waited=0.53, steps=2) == pytest.approx(2.5)
    assert rule.rest == 2
    noted(rule, steps=6)
    assert not rule.is_cold


def test_rule_rests_until_what_was_in_flight_before_it_shrank_is_trained():
    rule = begun(steps=10.0)
    assert noted(rule, left_over=6.0, steps=4) == 4
    assert noted(rule, left_over=6.0, steps=8) == 4, "these groups were ordered before"


def test_lag_does_not_shrink_back_to_what_made_the_trainer_wait():
    rule = begun(steps=3.0, cost=0.06)
    noted(rule, waited=0.5, steps=2)
    assert (rule.too_few, rule.steps) == (3.0, pytest.approx(3.79, abs=0.01))
    noted(rule, steps=100)
    assert 3.0 < rule.steps < 3.35


def test_lag_that_shrank_too_far_returns_to_what_it_was():
    rule = begun(steps=5.0, cost=0.06)
    assert noted(rule, steps=4) == 4, "a third of the way to two"
    noted(rule, waited=0.5, steps=rule.rest)
    assert noted(rule, waited=0.5, steps=2) == 5
    assert rule.too_few == 4
    noted(rule, waited=0.5, steps=rule.rest)
    assert noted(rule, waited=0.7, steps=2) > 5.5, "it did not shrink before: the trainer waits for another reason"


def test_lag_shrinks_by_the_groups_that_each_of_four_steps_left_over():
    rule = begun(steps=3.75)
    for left_over in (1.5, 0.75, 2.0):
        assert noted(rule, left_over=left_over, waited=0.02) == 3.75
    assert noted(rule, left_over=1.0) == 3
    assert noted(rule, left_over=9.0, steps=8) == 2, "the step that trains and the next one"


def test_groups_left_over_shrink_the_lag_to_what_made_the_trainer_wait_only_slowly():
    rule = begun(steps=5.0, too_few=3.0)
    assert noted(rule, left_over=4.0, steps=4) == pytest.approx(3.35)
    assert noted(rule, left_over=4.0, steps=40) == 2, "lag that long leaves over more than a step's groups is too much"


def test_lag_shrinks_while_orders_queue_and_does_not_grow_though_the_trainer_waits():
    rule = begun(steps=8.0)
    assert noted(rule, waited=0.5, queued=0.5, steps=2) == 8
    assert noted(rule, waited=0.5, queued=0.8) == pytest.approx(7.7)
    assert noted(begun(steps=8.0), waited=0.5, queued=6.0) == 7.5, "at most half a step at once"


def test_lag_grows_only_once_the_engines_queues_are_known():
    rule = begun(steps=3.0)
    assert noted(rule, waited=0.5, queued=None, steps=9) == 3
    assert noted(rule, waited=0.5, queued=0.0) == pytest.approx(3.92, abs=0.01)
    noted(rule, waited=0.5, queued=None, steps=rule.rest)
    assert noted(rule, waited=0.5, queued=None, steps=9) == pytest.approx(3.92, abs=0.01), (
        "the queue of before says nothing"
    )
    assert noted(rule, waited=0.5, queued=2.0) == pytest.approx(3.42, abs=0.01)


def test_low_sample_size_at_high_age_raises_the_price_of_lag_and_bounds_it():
    rule = begun(steps=8.0, cost=0.0)
    assert rule.price == pytest.approx(0.03), "the least"
    noted(rule, steps=60, ess=0.7, age=4.0, waited=0.1)
    assert rule.cost == pytest.approx(2 * 1.5 * (1 / 0.7 - 1) / 3**2, rel=0.05)
    assert rule.steps == pytest.approx((1 + 2 / (rule.cost * rule.share**2)) ** 0.5, rel=0.05)
    assert rule.price > 0.1
    untouched = begun()
    noted(untouched, steps=60, ess=0.2, age=1.0)
    assert untouched.cost == 0.02, "on policy, the sample size says nothing about lag"


def test_one_step_with_a_few_huge_weights_hardly_raises_the_cost_of_lag():
    rule = begun(cost=0.03)
    noted(rule, ess=0.1, age=3.0)
    assert rule.cost < 0.036, "the step shows 6.75"
    noted(rule, steps=20, ess=0.5, age=3.0)
    assert rule.cost > 0.3, "twenty such steps are no accident"


def test_what_the_sample_size_lacks_on_policy_is_not_put_down_to_lag():
    rule = begun(any_trained=False)
    noted(rule, ess=0.8, age=1.0)
    noted(rule, steps=60, ess=0.8, age=2.0)
    assert rule.cost == pytest.approx(0, abs=1e-3)


def test_lag_is_cheaper_if_most_rollouts_take_less_time_than_it_allows():
    rule, short = begun(steps=4.0, cost=0.06), begun(steps=4.0, cost=0.06)
    assert noted(rule, steps=20, waited=0.12, age=4.0) == 4
    assert noted(short, steps=20, waited=0.12, age=2.0) > 4
    assert short.share < 0.8 < rule.share


def test_j_grows_while_publications_hold_the_trainer_for_more_than_half_a_version_costs():
    rule = begun()
    noted(rule, held=0.2, steps=4)
    assert rule.j == 2, "half of the publications saves a tenth of a step"
    for _ in range(60):
        noted(rule, held=0.2 / rule.j)
    assert rule.j == 3, "the next version would save less than a sixtieth of a step"
    noted(rule, held=0.0, steps=60)
    assert rule.j == 1
    noted(bound := begun(), held=5.0, steps=60, most_j=2)
    assert bound.j == 2


def test_paused_rule_ignores_the_step_after_the_pause():
    rule = begun()
    rule.pause()
    assert noted(rule, waited=1.0, steps=2) == 2
    assert noted(rule, waited=1.0) > 2


def test_restored_rule_continues_as_if_it_had_never_stopped():
    rule = begun()
    noted(rule, waited=0.4, held=0.3, age=2.5, ess=0.9, steps=7)
    restored = msgspec.convert(msgspec.to_builtins(rule), LagRule)
    assert restored == rule
    assert noted(restored, waited=0.2, steps=9) == noted(rule, waited=0.2, steps=9)


def test_sentence_says_what_lag_gains_and_costs_and_why_j_is_what_it_is():
    rule = begun(steps=3.0, cost=0.03)
    assert rule.why(j=None) == "", "nothing is known yet"
    noted(rule, waited=0.25, held=0.02, age=3.0, sampling=1.0)
    assert rule.why(j=None) == (
        "lag 3.0: the trainer would wait 30% more without it, and it costs 6% of what a step teaches; j = 1: a "
        "publication holds the trainer for 2% of a step"
    )
    noted(rule, waited=1.0, age=3.0, most=3.0, steps=2)
    assert "and k or groups_in_flight allows no more; j = 4: set by the user" in rule.why(j=4)
    assert "and nothing shows what it costs" in rule.why(j=4, is_priced=False)


def took(rule, seconds, *, steps=1, busy=0.9, age=1.0, **figures):
    noted(rule, steps=steps, seconds=seconds, busy=busy, age=age, **figures)
    return rule.turns


def test_run_on_shared_processors_begins_with_turns_and_keeps_lag_if_its_steps_are_shorter():
    rule = begun(turns=Turns.first())
    assert rule.ahead == 1
    assert took(rule, 10.0, steps=3).are_taken
    assert not took(rule, 10.0).are_taken, "after the first step, three show how long turns take"
    assert rule.ahead == 2
    assert took(rule, 8.0, steps=5, age=2.0).before is None
    assert not took(rule, 8.0, steps=50, age=2.0).are_taken
    assert rule.why(j=None).startswith("lag 2.0")


def test_run_on_shared_processors_returns_to_turns_if_lag_does_not_pay_and_says_why():
    rule = begun(turns=Turns.first())
    took(rule, 10.0, steps=4)
    assert not took(rule, 9.95, steps=9, age=2.0).are_taken, "so close that three steps do not tell"
    turns = took(rule, 9.95, age=2.0)
    assert turns.are_taken, "9.95 s with lag teach as much as 10.05 s without it"
    assert not turns.have_begun
    assert not took(rule, 9.9, age=2.0).have_begun, "it still trains what was sampled with lag"
    assert took(rule, 9.9).have_begun
    took(rule, 10.0, steps=10)
    assert rule.ahead == 1
    assert rule.why(j=None) == (
        "on policy: engines and trainer take turns, each with all processors: a step takes 10 s, with lag 10 s"
    )
    assert took(rule, 10.0, steps=40).are_taken, "what lag was seen to take is no promise"
    assert not took(rule, 10.0, steps=8, busy=0.6).are_taken, "processors became idle that lag could use"


def test_a_way_is_judged_by_the_mean_of_its_steps_without_the_shortest_and_the_longest():
    rule = begun(turns=Turns.first())
    took(rule, 10.0, steps=4)
    for seconds in (12.0, 12.0, 6.0, 12.0, 6.0, 12.0, 6.0, 12.0, 6.0, 60.0):
        took(rule, seconds, age=2.0)
    assert not rule.turns.are_taken, "steps in turn long and short; the median step is longer than 10 s"
    assert rule.turns.seconds == pytest.approx(9 / 0.99, rel=0.01)


def test_lag_is_judged_only_once_it_has_stopped_growing():
    rule = LagRule(any_trained=True, turns=Turns.first())
    took(rule, 10.0, steps=4)
    assert not took(rule, 12.0, steps=9, age=2.0, waited=0.5).are_taken
    assert rule.steps > 2
    assert took(rule, 12.0, steps=14, age=2.0).are_taken


def test_turns_are_tried_while_processors_are_idle_and_ended_at_once_if_they_are_hopeless():
    rule = begun()
    assert not took(rule, 10.0, steps=40, busy=1.0).are_taken, "no processor is idle"
    turns = took(rule, 10.0, steps=8, busy=0.6)
    assert turns.are_taken
    took(rule, 10.0)
    assert not took(rule, 21.0).are_taken
    assert not took(rule, 10.0, steps=300, busy=0.6).are_taken


def test_rule_without_shared_processors_takes_no_turns():
    rule = begun()
    noted(rule, steps=100, seconds=10.0, age=2.0)
    assert rule.turns == Turns()
