"""Rules by which a parameter server drops versions: pure functions over versions, ordered by (epoch, version).

A version is dropped only when a newer one is complete and every member (replica or engine) has confirmed progress past
it (RLAX §3: "only once global progress to step k is confirmed across all replicas"). A late joiner therefore always
finds a version to catch up from, and no version disappears while a member is fetching it. Versions of an abandoned
epoch have no members, since no trainer sends engines to them any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

#: (epoch, version). All weights of a later trainer sort after those of an earlier one.
Key = tuple[int, int]


def collectable(whole: Set[Key], progress: Mapping[str, Key | None], *, epoch: int, in_use: Set[Key]) -> set[Key]:
    """Return the versions that are no longer needed.

    Args:
        whole: versions that are held and complete.
        progress: the version that each member has confirmed to hold or serve; None if it has confirmed none yet.
        epoch: epoch of the trainer that publishes now.
        in_use: versions that are being sent or saved at this moment.
    """
    newest = max(whole, default=None)
    return {
        key
        for key in whole
        if key != newest and key not in in_use and (key[0] < epoch or all(_past(key, at) for at in progress.values()))
    }


def holders(whole: Set[Key], progress: Mapping[str, Key | None], *, epoch: int, in_use: Set[Key]) -> list[str]:
    """Return one sentence per reason why an older version is kept, for a caller that waits for room."""
    newest = max(whole, default=None)
    reasons = []
    for key in sorted(whole - {newest}):
        behind = [f"{name} (at {named(at)})" for name, at in progress.items() if not _past(key, at)]
        if key in in_use:
            reasons.append(f"{named(key)} is being sent or saved")
        elif key[0] >= epoch and behind:
            reasons.append(f"{named(key)} is held for {', '.join(behind)}")
    return reasons


def named(key: Key | None) -> str:
    """Format a version for messages: `1.57`."""
    return "none" if key is None else f"{key[0]}.{key[1]}"


def _past(key: Key, confirmed: Key | None) -> bool:
    return confirmed is not None and confirmed > key
