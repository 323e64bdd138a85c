"""Tests of decisions about engines: canary checks, replacements, drains, and the processes to start or end."""

import pytest

from pipelinerl.controller.decisions.directives import publication_due
from pipelinerl.controller.decisions.engine_decisions import removal_reason, to_stop
from pipelinerl.controller.decisions.giving_up import waiting_for
from pipelinerl.controller.decisions.status import assignment_of
from pipelinerl.controller.state.fleet import EngineLifecycle
from pipelinerl.controller.state.inputs_and_effects import (
    EngineAnswered,
    EngineDrainAsked,
    EngineIdle,
    EngineRemoved,
    EnginesRequested,
    EngineTimedOut,
    HealthCheckMissed,
    Ticked,
)
from pipelinerl.messages import CanaryChecked, GroupOutdated
from tests.controller.world import ENGINE, OTHER, World, controller, joins, published, received, records


@pytest.fixture
def run():
    """Return a run in which one engine serves version 0."""
    made = World(controller(evaluation_problems=0)).begin(serves=True)
    assert lifecycle(made.controller, ENGINE) is EngineLifecycle.HEALTHY
    return made


def lifecycle(made, url):
    return made.state.fleet.by_url[url].lifecycle


def recorded(made, given):
    return [(record.kind, record.fields) for record in records(made.decide(given))]


def give_weights(run, *urls, version=0):
    run.controller.decide(received(published(urls, version=version, membership=run.state.fleet.membership)))


def proof(run, *, version=0, now=0.0, **results):
    about = {"epoch": run.state.epoch, "membership": run.state.fleet.membership, "worst": {}}
    return received(CanaryChecked(model_version=version, **about | results), now)


def test_engine_that_fails_its_canary_on_two_versions_is_expelled(run):
    made = run.controller
    made.decide(joins(OTHER))
    give_weights(run, ENGINE, OTHER)
    (canary_failed, lost) = recorded(made, proof(run, mismatched={OTHER: "0.7 nats off"}))
    assert canary_failed == (
        "engine_canary_failed",
        {"url": OTHER, "model_version": 0, "reason": "0.7 nats off", "lifecycle": EngineLifecycle.DIRTY},
    )
    assert lost == ("engine_lost", {"url": OTHER, "reason": "0.7 nats off"})
    assert recorded(made, EngineAnswered(now=0.0, url=OTHER)) == [], "the same weights again would be no update"
    while run.version == 0:
        run.act()
    run.give(EngineAnswered(now=0.0, url=OTHER))
    assert run.directive is not None and OTHER in run.directive.publish_to and run.directive.to_verify == [OTHER]
    give_weights(run, ENGINE, OTHER, version=1)
    (canary_failed, _) = recorded(made, proof(run, version=1, mismatched={OTHER: "0.7 nats off"}))
    assert canary_failed[1]["lifecycle"] is EngineLifecycle.EXPELLED
    assert to_stop(made.state) == [], "the process keeps running, so that an operator can inspect it"


def test_replaced_engine_drains_as_soon_as_its_replacement_has_passed_the_canary_check(run):
    made = run.controller
    requested = recorded(made, EnginesRequested(now=0.0, type="vllm", replaces=ENGINE, grace_s=9.0))
    assert requested == [("engines_hired", {"names": ["engine-1"], "type": "vllm", "replaces": ENGINE})]
    made.decide(joins(OTHER, name="engine-1", type="vllm"))
    give_weights(run, ENGINE, OTHER)
    assert lifecycle(made, ENGINE) is EngineLifecycle.HEALTHY
    kinds = [kind for kind, _ in recorded(made, proof(run, worst={OTHER: 1e-6}, now=5.0))]
    assert kinds == ["engine_verified", "engine_draining"]
    assert (made.state.fleet.serving(), made.state.fleet.finishing()) == ([OTHER], [ENGINE])
    assert recorded(made, Ticked(now=13.0)) == [], "it has 9 s from 5 on"
    ((kind, fields),) = recorded(made, Ticked(now=14.1))
    assert (kind, fields["reason"]) == ("engine_lost", "drained; its remaining work is handed over")
    assert lifecycle(made, ENGINE) is EngineLifecycle.EXPELLED
    assert made.state.fleet.by_url[ENGINE].to_stop


def test_engine_that_never_answers_its_canary_is_expelled(run):
    made = run.controller
    run.give(joins(OTHER))
    for failures in range(1, made.state.fleet.updates_to_expulsion + 1):
        assert run.directive.to_verify == [OTHER]
        give_weights(run, ENGINE, OTHER)
        run.give(proof(run, failed={OTHER: "400: no chat template"}))
        assert made.state.fleet.by_url[OTHER].failed_updates == failures
        # The first answered poll begins the wait for a retry, and the second ends it.
        for now in (100.0 * failures, 100.0 * failures + 60.0):
            run.give(EngineAnswered(now=now, url=OTHER))
    assert lifecycle(made, OTHER) is EngineLifecycle.EXPELLED
    assert publication_due(made.state, made.settings) == [] and made.state.fleet.serving() == [ENGINE]


def test_engine_that_failed_its_canary_is_not_retried_when_another_engine_joins(run):
    made = run.controller
    run.give(joins(OTHER))
    give_weights(run, ENGINE, OTHER)
    run.give(proof(run, mismatched={OTHER: "0.7 nats off"}))
    run.give(EngineAnswered(now=0.0, url=OTHER))
    run.give(joins("http://engine-2"))
    assert (run.directive.publish_to, run.directive.to_verify) == (["http://engine-2"], ["http://engine-2"])
    assert lifecycle(made, OTHER) is EngineLifecycle.DIRTY


def test_engine_that_is_already_being_replaced_gets_no_second_replacement(run):
    made = run.controller
    swap = EnginesRequested(now=0.0, type="torch", replaces=ENGINE, grace_s=9.0)
    assert removal_reason(made.state, ENGINE) == ""
    recorded(made, swap)
    assert recorded(made, swap) == []
    assert removal_reason(made.state, ENGINE) == "engine-1, which can be removed, was requested to replace it"
    made.decide(EngineRemoved(now=0.0, engine="engine-1"))
    assert recorded(made, swap)[0][1]["names"] == ["engine-2"]
    made.decide(joins(OTHER, name="engine-2", type="torch"))
    give_weights(run, ENGINE, OTHER)
    recorded(made, proof(run, worst={OTHER: 1e-6}))
    assert recorded(made, swap) == [] and removal_reason(made.state, ENGINE) == "it is being drained"
    assert [request.name for request in made.state.engine_requests] == ["engine-1", "engine-2"]


def test_replaced_engine_is_drained_only_once_even_if_its_address_is_reused(run):
    """A new engine may get the port of the old one, and the replacement passes another canary check later."""
    made = run.controller
    made.decide(joins(ENGINE))
    made.decide(EnginesRequested(now=0.0, type="torch", count=2, replaces=ENGINE, grace_s=9.0))
    made.decide(joins(OTHER, name="engine-1"))
    give_weights(run, ENGINE, OTHER)
    assert "engine_draining" in [kind for kind, _ in recorded(made, proof(run, worst={OTHER: 1e-6}, now=5.0))]
    made.decide(EngineIdle(now=9.0, url=ENGINE))
    for url, name in ((ENGINE, "engine-3"), ("http://engine-2", "engine-2")):
        made.decide(joins(url, "3", now=10.0, name=name))
    made.state.fleet.begin_epoch()
    give_weights(run, OTHER, ENGINE, "http://engine-2")
    recorded(made, proof(run, worst={ENGINE: 1e-6, OTHER: 1e-6, "http://engine-2": 1e-6}))
    assert [lifecycle(made, url) for url in (ENGINE, OTHER)] == [EngineLifecycle.HEALTHY, EngineLifecycle.HEALTHY]


def test_drained_engine_is_expelled_and_its_process_is_stopped_when_it_has_become_idle(run):
    made = run.controller
    made.decide(joins(OTHER, name="engine-1"))
    assert recorded(made, EngineIdle(now=0.0, url=OTHER)) == [], "no drain was requested"
    recorded(made, EngineDrainAsked(now=0.0, url=OTHER, grace_s=60.0))
    assert recorded(made, EngineIdle(now=3.0, url=OTHER)) == [
        ("engine_lost", {"url": OTHER, "reason": "drained", "planned": True})
    ]
    assert to_stop(made.state) == ["engine-1"]
    assert recorded(made, EngineDrainAsked(now=4.0, url=OTHER, grace_s=60.0)) == []


def test_draining_a_dead_engine_expels_it_immediately(run):
    made = run.controller
    made.decide(EngineTimedOut(now=0.0, url=ENGINE, reason="gone"))
    ((kind, fields),) = recorded(made, EngineDrainAsked(now=0.0, url=ENGINE, grace_s=60.0))
    assert (kind, fields["reason"]) == ("engine_lost", "drained: it had no work")


def test_request_for_an_engine_can_be_cancelled_and_its_name_is_never_reused(run):
    made = run.controller
    made.decide(joins(OTHER, name="engine-3"))  # started by an operator
    made.decide(EnginesRequested(now=0.0, type="torch", count=2))
    made.decide(EngineRemoved(now=0.0, engine="engine-1"))
    assert [(request.name, request.wanted) for request in made.state.engine_requests] == [
        ("engine-1", False),
        ("engine-2", True),
    ]
    assert to_stop(made.state) == ["engine-1"]
    made.decide(EnginesRequested(now=0.0, type="torch"))
    assert made.state.engine_requests[-1].name == "engine-4", "a name is given once"


def test_removing_a_name_that_two_engines_share_expels_both_engines_but_ends_no_process(run):
    made = run.controller
    made.decide(joins(OTHER, name="engine-0"))
    made.decide(joins(ENGINE, name="engine-0"))
    made.decide(EngineRemoved(now=0.0, engine=OTHER))
    assert to_stop(made.state) == [], "the launcher's engine-0 is the other one"


def test_frozen_engine_is_left_out_of_publications_and_named_until_it_has_caught_up(run):
    made, state = run.controller, run.state
    assert recorded(made, HealthCheckMissed(now=0.0, url=ENGINE)) == [("engine_suspect", {"url": ENGINE})]
    assert (state.fleet.serving(), state.fleet.finishing()) == ([], [ENGINE])
    assert recorded(made, EngineAnswered(now=0.0, url=ENGINE)) == [("engine_back", {"url": ENGINE})]
    made.decide(joins(OTHER, name="engine-1"))
    give_weights(run, ENGINE, OTHER)
    made.decide(proof(run, worst={OTHER: 0.0}))
    made.decide(HealthCheckMissed(now=1.0, url=OTHER))
    assigned = assignment_of(state, made.settings)
    assert (assigned.serving, assigned.finishing) == ((ENGINE,), ()), "other engines take over its work"
    assert f"{OTHER} is suspect: it does not answer polls" in waiting_for(state, now=1.0)
    state.version = 1
    assert publication_due(state, made.settings) == [ENGINE]
    give_weights(run, ENGINE, version=1)
    assert publication_due(state, made.settings) == []
    assert recorded(made, EngineAnswered(now=9.0, url=OTHER)) == [("engine_joined", {"url": OTHER, "name": "engine-1"})]
    assert lifecycle(made, OTHER) is EngineLifecycle.JOINING
    give_weights(run, OTHER, version=1)
    made.decide(proof(run, version=1, worst={OTHER: 0.0}))
    assert state.fleet.serving() == [ENGINE, OTHER] and OTHER not in waiting_for(state, now=9.0)


def test_group_that_an_actor_drops_as_too_old_counts_once_as_stale_and_is_replaced(run):
    made = run.controller
    before = len(run.issued)
    run.give(received(GroupOutdated(order_id="prompt-000003", index=3, oldest=0, current=9)))
    ledger = made.state.account.ledger()
    assert (ledger["stale"], ledger["in_flight"], ledger["issued"]) == (1, before, before + 1)
    assert run.issued[-1] == before
    run.give(received(GroupOutdated(order_id="prompt-000003", index=3, oldest=0, current=9)))
    assert made.state.account.ledger()["stale"] == 1, "it ends once"
    directive = made._directive("x")
    assert directive.stale == [3]
