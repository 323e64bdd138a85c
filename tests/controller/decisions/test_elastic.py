"""Tests of automatic scaling: the number of engines follows the work, converges, and stays within its limits."""

import random

import msgspec
from hypothesis import given, settings, strategies as st

from pipelinerl.config.sections import ElasticSection
from pipelinerl.controller.decisions.elastic import Want, next_change, note_change, suggestion
from pipelinerl.controller.decisions.engine_decisions import to_stop
from pipelinerl.controller.service.journal import Decision
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import (
    EngineDrainAsked,
    EngineIdle,
    EngineRemoved,
    FleetMeasured,
    KnobsPatched,
    Record,
    StopAsked,
)
from pipelinerl.controller.state.run_state import ElasticMemory, Figures, RunState
from pipelinerl.enums import Elasticity
from pipelinerl.messages import CanaryChecked, ConsumedReport
from tests.controller.world import controller, joins, published, ready, received, step_done

RULE = ElasticSection(interval_s=2.0, patience=2, settle_s=10.0)
SHARES = st.floats(0.0, 1.0)


def _made(rule, *, least=1, most=6):
    limits = {"engines_min": {"bigram": least}, "engines_max": {"bigram": most}}
    return controller(evaluation_problems=0, steps=10_000, elastic=rule, **limits)


class Site:
    """A run for which `work` engines just suffice: fewer engines delay the trainer, and more are partly idle."""

    def __init__(self, rule, *, work, most=6, least=1):
        self.made = _made(rule, least=least, most=most)
        self.work = work
        self.now = 0.0
        self.inputs = []
        self.event_records = []
        self.tell(joins("http://engine-0", name="engine-0", type="bigram"))
        self._report(ready("1"))
        self.settle_fleet()

    @property
    def state(self):
        return self.made.state

    @property
    def serving(self):
        return len(self.state.fleet.serving())

    def tell(self, given):
        self.inputs.append(given)
        self.event_records += [(each.kind, each.fields) for each in self.made.decide(given) if isinstance(each, Record)]

    def _report(self, report):
        self.tell(received(report, now=self.now))

    def settle_fleet(self):
        """Let requested engines join and pass their canary checks, and draining engines become idle and leave."""
        there = {record.name for record in self.state.fleet.records()}
        for request in self.state.engine_requests:
            if request.wanted and request.name not in there:
                self.tell(joins(f"http://{request.name}", now=self.now, name=request.name, type=request.type))
        for record in self.state.fleet.records():
            if record.lifecycle is EngineLifecycle.DRAINING:
                self.tell(EngineIdle(now=self.now, url=record.url))
        joining = self.state.fleet.to_verify()
        if joining:
            about = {"epoch": self.state.epoch, "membership": self.state.fleet.membership}
            self._report(published(self.state.fleet.members(), version=self.state.version, **about))
            worst = dict.fromkeys(joining, 0.0)
            self._report(CanaryChecked(model_version=self.state.version, worst=worst, **about))

    def second(self, *, stale=0.0):
        self.now += 1.0
        engines = self.serving
        waiting, occupancy = max(0.0, 1 - engines / self.work), min(1.0, self.work / engines)
        by_domain = {"a": {"groups": 10 * (1 - stale), "stale_groups": 10 * stale}}
        stats = {"wait_s": waiting, "step_s": 1 - waiting}
        self._report(step_done(self.state.version + 1, ConsumedReport(), stats=stats, by_domain=by_domain))
        self.tell(FleetMeasured(now=self.now, occupancy=occupancy))

    def pass_time(self, seconds, **figures):
        counts = []
        for _ in range(seconds):
            self.second(**figures)
            self.settle_fleet()
            counts.append(self.serving)
        return counts

    def scaled(self, kind="engines_scaled"):
        return [(fields["from"], fields["to"]) for record_kind, fields in self.event_records if record_kind == kind]


def _turns(counts):
    """Count how often the number of engines changes from growing to shrinking or back."""
    moves = [b - a for a, b in zip(counts, counts[1:], strict=False) if a != b]  # noqa: RUF007
    return sum(a * b < 0 for a, b in zip(moves, moves[1:], strict=False))  # noqa: RUF007


@settings(max_examples=8, deadline=None)
@given(work=st.floats(0.2, 8.0), most=st.integers(1, 6))
def test_number_of_engines_follows_the_work_and_converges(work, most):
    site = Site(RULE, work=work, most=most)
    counts = site.pass_time(140)
    assert _turns(counts) == 0 and len(set(counts[-60:])) == 1
    enough = min(most, max(1, work))
    assert enough * (1 - RULE.waiting) - 1 < counts[-1] <= enough / RULE.busy + 1


def test_engines_are_removed_one_by_one_when_work_decreases():
    site = Site(RULE, work=4.0)
    assert site.pass_time(140)[-1] == 4
    site.work = 0.5
    counts = site.pass_time(140)
    assert counts[-1] == 1 and _turns(counts) == 0
    assert site.scaled() == [(1, 2), (2, 3), (3, 4), (4, 3), (3, 2), (2, 1)]
    assert to_stop(site.state) == ["engine-1", "engine-2", "engine-3"], "never the first engine"


@given(figures=st.builds(Figures, waiting=SHARES, occupancy=SHARES, stale=SHARES), engines=st.integers(1, 64))
def test_removing_an_engine_never_makes_the_others_too_busy(figures, engines):
    """The remaining engines take over the work of the removed engine, and their occupancy stays below `busy`."""
    if suggestion(RULE, figures, engines=engines) is not Want.FEWER:
        return
    assert engines > 1
    occupancy = min(1.0, figures.occupancy * engines / (engines - 1))
    after = msgspec.structs.replace(figures, occupancy=occupancy)
    assert suggestion(RULE, after, engines=engines - 1) is not Want.MORE
    assert occupancy < RULE.busy


@given(
    shares=st.lists(st.tuples(SHARES, SHARES, SHARES), max_size=40),
    rule=st.builds(
        ElasticSection, patience=st.integers(1, 4), settle_s=st.sampled_from([0.0, 3.0, 30.0]), interval_s=st.just(1.0)
    ),
)
def test_number_of_engines_changes_only_after_several_equal_suggestions_and_a_settling_time(shares, rule):
    memory, verdicts, decided = ElasticMemory(), list[Want](), list[tuple[int, Want]]()
    for now, (waiting, occupancy, stale) in enumerate(shares):
        figures = Figures(waiting=waiting, occupancy=occupancy, stale=stale)
        verdicts.append(suggestion(rule, figures, engines=3))
        want = next_change(rule, memory, figures, engines=3, now=float(now))
        if want is not Want.SAME:
            since = max((at for at, _ in decided), default=-1)
            assert verdicts[-rule.patience :] == [want] * rule.patience and now - since >= rule.patience
            assert not decided or now - decided[-1][0] >= rule.settle_s
            decided.append((now, want))
            note_change(memory, now=float(now))


def test_dry_run_of_scaling_only_records_its_decisions():
    site = Site(RULE.model_copy(update={"mode": Elasticity.DRY_RUN}), work=3.0)
    assert set(site.pass_time(60)) == {1}
    assert set(site.scaled("engines_would_scale")) == {(1, 2)} and not site.state.engine_requests
    why = next(fields["why"] for kind, fields in site.event_records if kind == "engines_would_scale")
    assert why == "the engines are 100% busy, the trainer waits 67% of its time, and 0% of groups arrive too late"


def test_engines_are_added_when_groups_arrive_too_late_to_train():
    site = Site(RULE, work=1.0)  # one engine suffices, so the trainer does not wait
    assert set(site.pass_time(60)) == {1}
    assert site.pass_time(16, stale=0.3)[-1] == 2
    site.work = 0.5
    assert set(site.pass_time(60, stale=0.3)) == {2}
    assert site.pass_time(60)[-1] == 1


def test_limits_on_the_number_of_engines_can_be_changed_during_a_run():
    site = Site(RULE, work=5.0, most=2)
    assert site.pass_time(60)[-1] == 2
    site.tell(KnobsPatched(now=site.now, changes={"engines_max.bigram": 3}, who="me", time=1.0))
    assert site.pass_time(60)[-1] == 3
    # The limit is lowered to one engine, so two engines are removed regardless of their load.
    site.tell(KnobsPatched(now=site.now, changes={"engines_max": {"bigram": 1}}, who="me", time=2.0))
    assert site.pass_time(60)[-1] == 1
    changes = {"engines_min.bigram": 2, "engines_max.bigram": 2}
    site.tell(KnobsPatched(now=site.now, changes=changes, who="me", time=3.0))
    assert site.pass_time(60)[-1] == 2


def test_number_of_engines_is_unchanged_while_an_engine_joins_or_drains():
    site = Site(RULE, work=5.0)
    for _ in range(60):  # the requested engine does not join
        site.second()
    assert site.scaled() == [(1, 2)]
    site.pass_time(30)
    assert site.serving > 2
    site.tell(EngineDrainAsked(now=site.now, url="http://engine-1", grace_s=1000.0))
    before = len(site.scaled())
    for _ in range(60):
        site.second()
    assert len(site.scaled()) == before


def test_engine_that_the_launcher_cannot_start_is_not_requested_again():
    site = Site(RULE, work=5.0)
    for _ in range(20):
        site.second()
    (request,) = site.state.engine_requests
    site.tell(EngineRemoved(now=site.now, engine=request.name))  # the launcher reports that it cannot start the engine
    assert set(site.pass_time(60)) == {1} and len(site.state.engine_requests) == 1


def test_broken_engine_is_replaced_to_keep_the_minimum_number_of_engines():
    site = Site(RULE, work=0.1, least=2)
    assert site.pass_time(20)[-1] == 2
    # The launcher reports that the process of engine-1 died too often.
    site.tell(EngineRemoved(now=site.now, engine="engine-1"))
    assert site.serving == 1
    assert site.pass_time(20)[-1] == 2
    assert [record.name for record in site.state.fleet.records() if not record.to_stop] == ["engine-0", "engine-2"]


def test_engine_pinned_for_an_evaluation_is_not_removed_and_an_ending_run_is_not_scaled():
    site = Site(RULE, work=2.0)
    site.pass_time(60)
    site.state.fleet.pin("http://engine-1")
    site.work = 0.1
    site.pass_time(40)
    assert site.state.fleet.by_url["http://engine-1"].lifecycle is EngineLifecycle.HEALTHY
    site.work = 5.0
    site.tell(StopAsked(now=0.0, reason="enough"))
    assert set(site.pass_time(60)) == {1}


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**16))
def test_controller_that_replays_its_journal_makes_the_same_scaling_decisions(seed):
    dice, site = random.Random(seed), Site(RULE, work=3.0)
    for _ in range(60):
        site.work = dice.choice([site.work, dice.uniform(0.2, 6.0)])
        site.second(stale=dice.random())
        if dice.random() < 0.8:
            site.settle_fleet()
    again, half = _made(RULE), len(site.inputs) // 2
    for number, taken in enumerate(site.inputs):
        written = msgspec.msgpack.decode(msgspec.msgpack.encode(Decision(taken, 0, 0)), type=Decision)
        if number == half:  # a restarted controller loads its state from a snapshot
            again.state = msgspec.msgpack.decode(msgspec.msgpack.encode(again.state), type=RunState)
        again.decide(written.given)
    assert again.state.elastic == site.state.elastic
    assert again.state.engine_requests == site.state.engine_requests
