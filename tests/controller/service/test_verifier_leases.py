"""Verifier services that actors are told of: who has spoken lately, until it says that it leaves."""

from __future__ import annotations

from pipelinerl.controller.routes import LEASE_S
from pipelinerl.controller.service.verifier_leases import MOST_SERVICES, VerifierLeases
from tests.fakes.verifier_service import lease


def test_a_lease_lasts_as_long_as_it_is_renewed() -> None:
    now = [0.0]
    leases = VerifierLeases(lambda: now[0])
    leases.offer(lease("http://a:1"))
    now[0] = LEASE_S - 1
    leases.offer(lease("http://b:1"))
    assert [each.url for each in leases.current()] == ["http://a:1", "http://b:1"]
    now[0] = LEASE_S
    assert [each.url for each in leases.current()] == ["http://b:1"]
    leases.offer(lease("http://b:1", life="2"))
    now[0] = 2 * LEASE_S - 1
    assert leases.current() == (lease("http://b:1", life="2"),)


def test_what_is_withdrawn_comes_back_only_by_an_offer() -> None:
    leases = VerifierLeases(lambda: 0.0)
    leases.offer(lease("http://a:1"))
    leases.withdraw("http://unknown:1")
    leases.withdraw("http://a:1")
    assert leases.current() == ()
    leases.offer(lease("http://a:1"))
    assert len(leases.current()) == 1


def test_there_are_at_most_so_many_at_a_time() -> None:
    now = [0.0]
    leases = VerifierLeases(lambda: now[0])
    assert all(leases.offer(lease(f"http://a:{port}")) for port in range(1, MOST_SERVICES + 1))
    assert not leases.offer(lease("http://b:1")) and len(leases.current()) == MOST_SERVICES
    assert leases.offer(lease("http://a:1", life="2")), "one of them goes on"
    now[0] = LEASE_S
    assert leases.offer(lease("http://b:1")), "the others have not been heard of"
