"""Who may be given work: every edge of the drawing at the top of `fleet.py`, and when a new group must be formed."""

from __future__ import annotations

import pytest

from pipelinerl.controller.fleet import Fleet, Standing

A, B = "http://a", "http://b"


@pytest.fixture
def fleet() -> Fleet:
    """A serves version 3; B has joined and waits for weights."""
    made = Fleet(updates_to_expulsion=2)
    made.join(A, "1")
    made.published(A, 3)
    made.join(B, "1")
    return made


def standing(fleet: Fleet, url: str) -> Standing:
    return next(record.standing for record in fleet.records() if record.url == url)


def test_only_a_publication_makes_healthy(fleet: Fleet) -> None:
    assert (fleet.members(), fleet.serving()) == ([A, B], [A])
    assert fleet.awaits_weights() and fleet.oldest_loaded() == 3
    fleet.published(B, 5)
    assert fleet.serving() == [A, B] and not fleet.awaits_weights()
    assert fleet.oldest_loaded() == 3
    fleet.published("http://unknown", 5)
    assert fleet.members() == [A, B]


def test_a_repeated_offer_changes_nothing(fleet: Fleet) -> None:
    before = (fleet.membership, fleet.records())
    assert not fleet.join(A, "1") and not fleet.join(A) and not fleet.join(B, "1")
    assert (fleet.membership, fleet.records()) == before


def test_a_new_life_has_lost_its_weights(fleet: Fleet) -> None:
    before = fleet.membership
    assert fleet.join(A, "2")
    assert standing(fleet, A) is Standing.JOINING and fleet.oldest_loaded() is None
    assert fleet.membership == before + 1
    assert not fleet.join(A, "2")


def test_an_engine_that_an_operator_named_first_keeps_its_weights_at_its_own_offer() -> None:
    fleet = Fleet()
    assert fleet.join(A)
    fleet.published(A, 1)
    assert not fleet.join(A, "1")
    assert fleet.serving() == [A]
    assert fleet.join(A, "2")


def test_silence_is_death_and_an_answer_brings_back_into_joining(fleet: Fleet) -> None:
    assert fleet.silent(A, "no answer")
    assert standing(fleet, A) is Standing.DEAD and fleet.members() == [B]
    assert not fleet.silent(A, "still none"), "it dies once"
    before = fleet.membership
    assert fleet.returned(A) and not fleet.returned(A)
    assert standing(fleet, A) is Standing.JOINING and fleet.membership == before + 1
    assert not fleet.silent("http://unknown", "x") and not fleet.returned("http://unknown")


def test_failed_updates_end_in_expulsion_which_its_own_offers_do_not_undo(fleet: Fleet) -> None:
    assert fleet.publish_failed(A, "no room")
    assert standing(fleet, A) is Standing.DEAD and fleet.members() == [B], "it is not asked again before it answers"
    assert not fleet.join(A, "1") and standing(fleet, A) is Standing.DEAD
    assert fleet.returned(A) and standing(fleet, A) is Standing.JOINING
    fleet.published(A, 4)
    assert fleet.publish_failed(A, "no room")
    assert standing(fleet, A) is Standing.DEAD, "a success between forgives"
    assert fleet.returned(A)
    assert fleet.publish_failed(A, "no room")
    assert standing(fleet, A) is Standing.EXPELLED and fleet.members() == [B]
    assert not fleet.join(A, "1") and standing(fleet, A) is Standing.EXPELLED
    assert not fleet.publish_failed(A, "a late report of the same update")
    assert not fleet.returned(A)
    assert standing(fleet, A) is Standing.EXPELLED


@pytest.mark.parametrize("incarnation", ["", "2"], ids=["an operator", "a new life"])
def test_who_brings_an_expelled_engine_back(fleet: Fleet, incarnation: str) -> None:
    fleet.expel(A, "removed by an operator")
    assert fleet.members() == [B] and not fleet.join(A, "1")
    assert fleet.join(A, incarnation)
    assert standing(fleet, A) is Standing.JOINING


def test_the_membership_grows_whenever_the_set_that_shares_a_group_changes(fleet: Fleet) -> None:
    seen = [fleet.membership]

    def changed() -> bool:
        seen.append(fleet.membership)
        return seen[-1] > seen[-2]

    fleet.published(B, 3)
    assert not changed()
    fleet.join("http://c")
    assert changed()
    fleet.publish_failed(B, "x")
    assert changed()
    fleet.expel("http://c", "x")
    assert changed()
    fleet.expel("http://c", "again")
    assert not changed()
    fleet.begin_epoch()
    assert changed() and fleet.serving() == []


def test_who_restarted_has_lost_its_weights(fleet: Fleet) -> None:
    before = fleet.membership
    assert fleet.restarted(A) and standing(fleet, A) is Standing.JOINING and fleet.membership == before + 1
    assert not fleet.restarted(B), "who waits for weights has none to lose"
