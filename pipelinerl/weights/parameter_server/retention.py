"""Which versions a parameter server may forget: pure rules over versions, which are ordered by (epoch, version).

A version is collected only when a newer one is whole and every member that is counted on, replica or engine, has
confirmed progress past it (RLAX §3: "only once global progress to step k is confirmed across all replicas"). So there
is always one that a late joiner can catch up from, and none vanishes under a member that is still fetching it. Versions
of an abandoned epoch have no members: nobody can be told to fetch them any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Set

#: (epoch, version): a later trainer's weights come after all of an earlier one's.
Key = tuple[int, int]


def collectable(whole: Set[Key], progress: Mapping[str, Key | None], *, epoch: int, in_use: Set[Key]) -> set[Key]:
    """The versions that nobody needs.

    Args:
        whole: versions that are held and complete.
        progress: what each member has confirmed to hold or serve; None before its first confirmation.
        epoch: of the trainer that publishes now.
        in_use: versions that are being sent or saved at this moment.
    """
    newest = max(whole, default=None)
    return {
        key
        for key in whole
        if key != newest and key not in in_use and (key[0] < epoch or all(_past(key, at) for at in progress.values()))
    }


def holders(whole: Set[Key], progress: Mapping[str, Key | None], *, epoch: int, in_use: Set[Key]) -> list[str]:
    """A sentence for each reason why a version that is not the newest stays, for whoever waits for room."""
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
    """How messages write a version: `1.57`."""
    return "none" if key is None else f"{key[0]}.{key[1]}"


def _past(key: Key, confirmed: Key | None) -> bool:
    return confirmed is not None and confirmed > key
