"""Retention rules: which versions may be dropped, over generated small histories."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from pipelinerl.weights.parameter_server.retention import Key, collectable, holders

keys = st.tuples(st.integers(1, 3), st.integers(0, 5))
histories = st.fixed_dictionaries(
    {
        "whole": st.sets(keys, max_size=6),
        "progress": st.dictionaries(st.sampled_from("abc"), st.none() | keys),
        "in_use": st.sets(keys, max_size=3),
    }
)


@pytest.mark.parametrize(
    ("whole", "progress", "collected"),
    [
        ({(1, 5)}, {}, set()),
        ({(1, 5)}, {"a": (1, 9)}, set()),
        ({(1, 5), (1, 6)}, {"a": (1, 5)}, set()),
        ({(1, 5), (1, 6)}, {"a": (1, 6)}, {(1, 5)}),
        ({(1, 5), (1, 6)}, {"a": (1, 6), "late": None}, set()),
        ({(1, 5), (1, 6)}, {"a": (1, 6), "behind": (1, 4)}, set()),
        ({(1, 5), (1, 6)}, {}, {(1, 5)}),
        ({(1, 5), (1, 6), (1, 7)}, {"a": (1, 6)}, {(1, 5)}),
    ],
)
def test_version_is_dropped_when_all_members_are_past_it(
    whole: set[Key], progress: dict[str, Key | None], collected: set[Key]
) -> None:
    assert collectable(whole, progress, epoch=1, in_use=set()) == collected


def test_version_in_use_is_kept() -> None:
    whole = {(1, 5), (1, 6)}
    assert collectable(whole, {"a": (1, 6)}, epoch=1, in_use={(1, 5)}) == set()
    assert holders(whole, {"a": (1, 6)}, epoch=1, in_use={(1, 5)}) == ["1.5 is being sent or saved"]


def test_abandoned_epoch_is_held_for_no_member() -> None:
    whole, progress = {(1, 8), (1, 9)}, {"a": (1, 8), "b": None}
    assert collectable(whole, progress, epoch=1, in_use=set()) == set()
    assert holders(whole, progress, epoch=1, in_use=set()) == ["1.8 is held for a (at 1.8), b (at none)"]
    assert collectable(whole, progress, epoch=2, in_use=set()) == {(1, 8)}, "the newest stays, to catch up from"
    assert collectable(whole | {(2, 3)}, progress, epoch=2, in_use=set()) == {(1, 8), (1, 9)}


@given(histories, st.integers(1, 4))
def test_needed_versions_are_never_dropped(history: dict[str, object], epoch: int) -> None:
    whole, progress, in_use = history["whole"], history["progress"], history["in_use"]
    assert isinstance(whole, set) and isinstance(progress, dict) and isinstance(in_use, set)
    gone = collectable(whole, progress, epoch=epoch, in_use=in_use)
    assert gone <= whole and not gone & in_use
    if whole:
        assert max(whole) not in gone
    for key in gone:
        if key[0] >= epoch:
            assert all(at is not None and at > key for at in progress.values())
    kept = whole - gone
    reasons = holders(kept, progress, epoch=epoch, in_use=in_use)
    assert len(reasons) == max(len(kept) - 1, 0), "every version that stays, but the newest, has a reason"


@given(histories, keys)
def test_progress_never_keeps_more_versions(history: dict[str, object], reached: Key) -> None:
    whole, progress, in_use = history["whole"], history["progress"], history["in_use"]
    assert isinstance(whole, set) and isinstance(progress, dict) and isinstance(in_use, set)
    ahead = {name: max(at, reached) if at else reached for name, at in progress.items()}
    before = collectable(whole, progress, epoch=1, in_use=in_use)
    assert before <= collectable(whole, ahead, epoch=1, in_use=in_use)
