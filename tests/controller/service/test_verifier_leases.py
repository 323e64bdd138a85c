"""Tests of the verifier services that actors may use: each is listed until its offer expires or is withdrawn."""

from __future__ import annotations

from pipelinerl.controller.routes import LEASE_S
from pipelinerl.controller.service.verifier_leases import MOST_SERVICES, VerifierLeases
from tests.fakes.verifier_service import lease


def test_verifier_lease_lasts_while_it_is_renewed() -> None:
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


def test_withdrawn_verifier_service_returns_only_by_a_new_offer() -> None:
    leases = VerifierLeases(lambda: 0.0)
    leases.offer(lease("http://a:1"))
    leases.withdraw("http://unknown:1")
    leases.withdraw("http://a:1")
    assert leases.current() == ()
    leases.offer(lease("http://a:1"))
    assert len(leases.current()) == 1


def test_number_of_verifier_services_is_limited() -> None:
    now = [0.0]
    leases = VerifierLeases(lambda: now[0])
    assert all(leases.offer(lease(f"http://a:{port}")) for port in range(1, MOST_SERVICES + 1))
    assert not leases.offer(lease("http://b:1")) and len(leases.current()) == MOST_SERVICES
    assert leases.offer(lease("http://a:1", life="2")), "one of them goes on"
    now[0] = LEASE_S
    assert leases.offer(lease("http://b:1")), "the others have not been heard of"
