"""Which checkpoints stay, and what the streams may forget: pure rules over model versions.

Two kinds stay. The newest `keep` are there to go on from: nothing that one of them would read again is trimmed from
the streams, so that when the newest turns out damaged the one before it is as good as it was when it was made. The
best `keep_best`, by the accuracy of the evaluation of that version, are there for the weights in them: however old they
get, `keep` does not remove them, and the streams do not wait for them. (A run that had nothing else would still go on
from one: orders whose groups are gone are issued again.)

An accuracy counts once it has come: an evaluation takes a while, and is known to the checkpoints after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """How many stay: the newest `keep` (at least 1), and the best `keep_best`."""

    keep: int
    keep_best: int = 0

    def resumable(self, versions: Iterable[int]) -> list[int]:
        """Those to go on from, ascending."""
        return sorted(set(versions))[-self.keep :]

    def survivors(self, versions: Iterable[int], accuracies: Mapping[int, float]) -> set[int]:
        """Those that stay, given the accuracies that are known, by version; of equals the later is better."""
        present = set(versions)
        evaluated = sorted(present & accuracies.keys(), key=lambda version: (accuracies[version], version))
        best = evaluated[-self.keep_best :] if self.keep_best else []
        return {*self.resumable(present), *best}
