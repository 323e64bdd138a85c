"""Tests of the fleet: every cell of the transition table in `fleet.py`, and when the membership number changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings, strategies as st

from inference_contract.errors import Persistence
from pipelinerl.controller.state.fleet import EngineLifecycle, Fleet, base_url

A, B = "http://a", "http://b"


def serve(fleet, url, version):
    fleet.on_published(url, version, membership=fleet.membership)
    assert fleet.on_verified(url, version, membership=fleet.membership)


@pytest.fixture
def fleet():
    """Return a fleet in which engine A serves version 3, and engine B has joined and waits for weights."""
    made = Fleet(updates_to_expulsion=2)
    made.join(A, "1")
    serve(made, A, 3)
    made.join(B, "1")
    return made


def lifecycle(fleet, url):
    return next(record.lifecycle for record in fleet.records() if record.url == url)


def fail(fleet, url, reason="no room"):
    return fleet.publish_failed(url, reason, membership=fleet.membership)


# --- the transition table --------------------------------------------------------------------------------------------

REACH: dict[EngineLifecycle, Callable[[Fleet], object]] = {
    EngineLifecycle.JOINING: lambda fleet: None,
    EngineLifecycle.HEALTHY: lambda fleet: serve(fleet, B, 3),
    EngineLifecycle.SUSPECT: lambda fleet: (serve(fleet, B, 3), fleet.on_missed_poll(B)),
    EngineLifecycle.DRAINING: lambda fleet: (serve(fleet, B, 3), fleet.drain(B, now=0.0, by=9.0)),
    EngineLifecycle.DIRTY: lambda fleet: fail(fleet, B),
    EngineLifecycle.DEAD: lambda fleet: fleet.on_timeout(B, "no answer"),
    EngineLifecycle.EXPELLED: lambda fleet: fleet.expel(B, "removed"),
}
EVENTS: dict[str, Callable[[Fleet], object]] = {
    "join": lambda fleet: fleet.join(B, "2"),
    "published": lambda fleet: fleet.on_published(B, 4, membership=fleet.membership),
    "proved": lambda fleet: fleet.on_verified(B, 3, membership=fleet.membership),
    "canary_failed": lambda fleet: fleet.canary_failed(B, 3, "differs", membership=fleet.membership),
    "publish_failed": lambda fleet: fail(fleet, B),
    "update_missed": lambda fleet: fleet.update_missed(B, "others failed", membership=fleet.membership),
    "missed": lambda fleet: fleet.on_missed_poll(B),
    "answered": lambda fleet: fleet.answered(B, version=4),
    "silent": lambda fleet: fleet.on_timeout(B, "no answer"),
    "restarted": lambda fleet: fleet.restarted(B),
    "drain": lambda fleet: fleet.drain(B, now=0.0, by=9.0),
    "expel": lambda fleet: fleet.expel(B, "removed"),
    "begin_epoch": lambda fleet: fleet.begin_epoch(),
}
_J, _H, _S, _R, _D, _X, _E = EngineLifecycle
TABLE: dict[str, tuple[EngineLifecycle, ...]] = {
    # expected state after each event if the engine was: joining, healthy, suspect, draining, dirty, dead, expelled
    "join": (_J, _J, _J, _E, _J, _J, _J),
    "published": (_J, _H, _S, _R, _D, _X, _E),
    "proved": (_J, _H, _S, _R, _D, _X, _E),
    "canary_failed": (_D, _D, _S, _R, _D, _X, _E),
    "publish_failed": (_D, _D, _D, _E, _D, _X, _E),
    "update_missed": (_D, _D, _D, _E, _D, _X, _E),
    "missed": (_J, _S, _S, _R, _D, _X, _E),
    "answered": (_J, _H, _H, _R, _J, _J, _E),
    "silent": (_X, _X, _X, _E, _X, _X, _E),
    "restarted": (_J, _J, _J, _E, _D, _X, _E),
    "drain": (_R, _R, _R, _R, _E, _E, _E),
    "expel": (_E, _E, _E, _E, _E, _E, _E),
    "begin_epoch": (_J, _J, _J, _R, _D, _X, _E),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("before", EngineLifecycle)
def test_each_event_takes_an_engine_from_each_state_to_the_state_in_the_transition_table(fleet, event, before):
    REACH[before](fleet)
    assert lifecycle(fleet, B) is before
    members = fleet.members()
    membership = fleet.membership
    EVENTS[event](fleet)
    assert lifecycle(fleet, B) is TABLE[event][list(EngineLifecycle).index(before)]
    assert fleet.membership > membership or fleet.members() == members, "a group that changed is another group"


# --- no work before the canary check ---------------------------------------------------------------------------------


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*EVENTS, "failed proof", "late report"]),
            st.sampled_from([A, B]),
            st.integers(0, 3),
            st.integers(-2, 0),
        ),
        max_size=60,
    )
)
def test_engine_never_serves_before_it_has_passed_the_canary_on_its_weights(events):
    """The test makes random events, and tracks which engines got weights and then passed the canary check."""
    fleet = Fleet()
    given = {}  # by URL: version and membership of the last publication to its engine
    proven = set()
    born = {}
    lives = 0

    def lose(*urls):
        for url in urls:
            given.pop(url, None)
            proven.discard(url)

    for event, url, version, age in events:
        membership = max(fleet.membership + age, 0)
        before = fleet.by_url.get(url)
        match event:
            case "join":
                lives += 1
                fleet.join(url, str(lives))
                lose(url)
                born[url] = fleet.membership
            case "published" | "late report":
                fleet.on_published(url, version, membership=membership)
                if before is not None and before.lifecycle.is_alive and membership >= born[url]:
                    given[url] = (version, membership)
            case "proved":
                fleet.on_verified(url, version, membership=membership)
                if membership >= born.get(url, 0) and given.get(url, (-1, 0))[0] == version:
                    proven.add(url)
            case "canary_failed" | "failed proof" | "publish_failed":
                reports = (
                    fleet.publish_failed(url, "x", membership=membership)
                    if event == "publish_failed"
                    else fleet.canary_failed(url, version, "x", membership=membership)
                )
                if reports:
                    lose(url)
                    born[url] = fleet.membership
            case "missed":
                fleet.on_missed_poll(url)
            case "answered":
                if (
                    fleet.answered(url, version=version)
                    and before is not None
                    and before.lifecycle is not EngineLifecycle.SUSPECT
                ):
                    lose(url)
                    born[url] = fleet.membership
            case "silent":
                if fleet.on_timeout(url, "x"):
                    lose(url)
            case "restarted":
                if fleet.restarted(url):
                    lose(url)
                    born[url] = fleet.membership
            case "drain":
                fleet.drain(url, now=0.0, by=1.0)
            case "expel":
                fleet.expel(url, "x")
                lose(url)
            case "begin_epoch":
                fleet.begin_epoch()
                lose(A, B)
                born = dict.fromkeys(born, fleet.membership)
        assert set(fleet.serving()) <= proven, (event, url)
        assert set(fleet.serving()) <= set(fleet.verified()) <= set(fleet.members())
        assert not set(fleet.serving()) & set(fleet.finishing())
        assert all(fleet.by_url[serving].loaded == given[serving][0] for serving in fleet.serving())


# --- single transitions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "known"),
    [
        ("http://localhost:8001/", "http://127.0.0.1:8001"),
        ("https://LocalHost", "https://127.0.0.1"),
        ("http://localhost.lab:8001", "http://localhost.lab:8001"),
        ("http://gpu-1:8001", "http://gpu-1:8001"),
        ("http://[::1]:8001", "http://[::1]:8001"),
        ("localhost", "localhost"),
        ("engine-0", "engine-0"),
    ],
)
def test_engine_urls_of_the_same_host_are_normalised_to_one_form(named, known):
    assert base_url(named) == known


def test_update_report_from_before_an_engines_restart_is_ignored(fleet):
    before = fleet.membership
    fleet.join(B, "2")
    fleet.on_published(B, 5, membership=before)
    assert not fleet.on_verified(B, 5, membership=before) and not fleet.publish_failed(B, "gone", membership=before)
    assert fleet.without_weights() == [B] and lifecycle(fleet, B) is EngineLifecycle.JOINING


def test_engine_that_fails_its_canary_is_retried_immediately_if_no_other_engine_serves(fleet):
    fleet.canary_failed(B, 3, "x", membership=fleet.membership)
    assert not fleet.answered(B, version=3)
    fleet.on_timeout(A, "gone")
    assert fleet.answered(B, version=3) and fleet.without_weights() == [B]


def test_engine_that_failed_its_canary_is_retried_immediately_by_a_new_trainer(fleet):
    """A new trainer's weights differ, even if their version number is the same."""
    fleet.canary_failed(B, 3, "x", membership=fleet.membership)
    fleet.begin_epoch()
    serve(fleet, A, 3)
    assert fleet.answered(B, version=3)


def test_repeated_registration_of_an_engine_only_updates_its_name_and_type(fleet):
    before = (fleet.membership, fleet.records())
    assert not fleet.join(A, "1") and not fleet.join(A) and not fleet.join(B, "1")
    assert (fleet.membership, fleet.records()) == before
    fleet.join(A, "1", name="engine-0", type="torch")
    assert (fleet.by_url[A].name, fleet.by_url[A].type, fleet.serving()) == ("engine-0", "torch", [A])


def test_engine_whose_updates_fail_repeatedly_is_expelled_and_its_registrations_are_ignored(fleet):
    assert fail(fleet, A)
    assert lifecycle(fleet, A) is EngineLifecycle.DIRTY and fleet.members() == [B], (
        "it gets no update before it answers a poll"
    )
    assert not fleet.join(A, "1") and lifecycle(fleet, A) is EngineLifecycle.DIRTY
    assert fleet.answered(A, version=4) and lifecycle(fleet, A) is EngineLifecycle.JOINING
    serve(fleet, A, 4)
    assert fail(fleet, A)
    assert lifecycle(fleet, A) is EngineLifecycle.DIRTY, "a success between forgives"
    assert fleet.answered(A, version=4)
    assert fail(fleet, A)
    assert lifecycle(fleet, A) is EngineLifecycle.EXPELLED and fleet.members() == [B]
    assert not fleet.join(A, "1") and lifecycle(fleet, A) is EngineLifecycle.EXPELLED
    assert not fail(fleet, A), "a late report of the same update"
    assert not fleet.answered(A, version=4)
    assert not fleet.by_url[A].to_stop, "the process keeps running for inspection"


@pytest.mark.parametrize("incarnation", ["", "2"], ids=["joined by an operator", "restarted process"])
def test_expelled_engine_is_readmitted_by_an_operator_or_after_its_restart(fleet, incarnation):
    fleet.expel(A, "removed by an operator", to_stop=True)
    assert fleet.members() == [B] and not fleet.join(A, "1") and fleet.by_url[A].to_stop
    assert fleet.join(A, incarnation)
    assert lifecycle(fleet, A) is EngineLifecycle.JOINING and not fleet.by_url[A].to_stop


def test_engine_that_misses_updates_because_of_other_engines_is_never_expelled(fleet):
    for version in range(3, 3 + 4 * fleet.updates_to_expulsion):
        assert fleet.update_missed(A, "16 joins wait for their peers", membership=fleet.membership)
        assert lifecycle(fleet, A) is EngineLifecycle.DIRTY
        assert fleet.answered(A, version=version)
    assert fleet.by_url[A].failed_updates == 0
    serve(fleet, A, 99)


def expel_for_failures(fleet, url):
    for _ in range(fleet.updates_to_expulsion):
        fleet.answered(url, version=4)
        assert fail(fleet, url)
    assert lifecycle(fleet, url) is EngineLifecycle.EXPELLED


def test_expelled_engine_may_return_after_a_wait_that_doubles_each_time(fleet):
    now = 100.0
    for rest_s in (30.0, 60.0, 120.0):
        expel_for_failures(fleet, B)
        assert not fleet.is_known(B, "1", name="", type="", now=now) and not fleet.join(B, "1", now=now)
        assert fleet.is_known(B, "1", name="", type="", now=now + rest_s - 0.1), "offers meanwhile decide nothing"
        assert not fleet.join(B, "1", now=now + rest_s - 0.1)
        membership, now = fleet.membership, now + rest_s
        assert fleet.join(B, "1", now=now) and lifecycle(fleet, B) is EngineLifecycle.JOINING
        assert fleet.membership > membership and fleet.by_url[B].failed_updates == 0
    serve(fleet, B, 5)
    expel_for_failures(fleet, B)
    fleet.join(B, "1", now=now)
    assert fleet.join(B, "1", now=now + 30.0), "a proof forgives"


@pytest.mark.parametrize("reason", ["removed", "permanent", "wrong weights"])
def test_permanently_expelled_engine_is_not_readmitted_until_its_process_restarts(fleet, reason):
    if reason == "removed":
        fleet.expel(B, "removed by an operator", to_stop=True)
    elif reason == "permanent":
        fleet.publish_failed(B, "wrong layout", membership=fleet.membership, persistence=Persistence.PERMANENT)
    else:
        for version in (3, 4):
            fleet.on_published(B, version, membership=fleet.membership)
            assert fleet.canary_failed(B, version, "differs", membership=fleet.membership)
            fleet.answered(B, version=version + 1)
    assert not fleet.join(B, "1", now=1.0) and not fleet.join(B, "1", now=9999.0)
    assert lifecycle(fleet, B) is EngineLifecycle.EXPELLED
    assert fleet.by_url[B].refuses is (reason != "removed")
    assert fleet.join(B, "2") and lifecycle(fleet, B) is EngineLifecycle.JOINING and not fleet.by_url[B].refuses


def test_engine_waits_longer_to_rejoin_after_each_process_that_died_before_passing_a_canary(fleet):
    now, waits = 0.0, []
    for life in range(2, 12):
        wait_s = fleet.offer_wait_s(B, f"{life}", now=now)
        waits.append(wait_s)
        now += wait_s
        assert fleet.offer_wait_s(B, f"{life}", now=now) == 0 and fleet.join(B, f"{life}", now=now)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert fleet.offer_wait_s(B, "", now=now) == 0, "an operator's word is taken at once"
    serve(fleet, B, 3)
    assert fleet.offer_wait_s(B, "12", now=now) == 0 and fleet.join(B, "12", now=now)
    assert fleet.offer_wait_s(B, "13", now=now) == 0, "a proof forgives"


def test_engine_that_never_passed_a_canary_is_retried_at_growing_intervals():
    fleet, now, waits = Fleet(updates_to_expulsion=9), 0.0, []
    fleet.join(A, "1")
    for _ in range(8):
        assert fail(fleet, A)
        began = now
        while not fleet.answered(A, version=1, now=now):
            now += 0.5
        waits.append(now - began)
    assert waits == [0, 1, 2, 4, 8, 16, 32, 60]
    serve(fleet, A, 1)
    assert fail(fleet, A) and fleet.answered(A, version=2, now=now), "one that has proven itself is tried at once"


def test_suspect_engine_is_left_out_while_another_engine_is_healthy(fleet):
    serve(fleet, B, 3)
    assert fleet.on_missed_poll(B)
    assert (fleet.serving(), fleet.verified(), fleet.finishing(), fleet.to_update()) == ([A], [A], [], [A])
    fleet.on_published(A, 4, membership=fleet.membership)
    assert fleet.oldest_loaded() == 4, "prompt orders do not wait for the suspect engine's weights"
    assert fleet.on_missed_poll(A) and fleet.verified() == fleet.finishing() == fleet.to_update() == [A, B]


@pytest.mark.parametrize(("published", "becomes"), [(3, EngineLifecycle.HEALTHY), (4, EngineLifecycle.JOINING)])
def test_suspect_engine_that_has_missed_a_publication_joins_again(fleet, published, becomes):
    serve(fleet, B, 3)
    fleet.on_missed_poll(B)
    fleet.on_published(A, published, membership=fleet.membership)
    before = fleet.membership
    assert fleet.answered(B, version=published) and lifecycle(fleet, B) is becomes
    assert (fleet.membership > before) is (becomes is EngineLifecycle.JOINING)


def test_restarted_engine_has_lost_its_weights_and_must_join_again(fleet):
    before = fleet.membership
    assert fleet.restarted(A) and lifecycle(fleet, A) is EngineLifecycle.JOINING and fleet.membership == before + 1
    assert not fleet.restarted(B), "who waits for weights has none to lose"
    assert not fleet.on_timeout("http://unknown", "x") and not fleet.answered("http://unknown", version=3)
