"""Retention of checkpoints and stream entries, as pure rules over model versions.

Two kinds of checkpoint are kept. The newest `keep` are for resuming: the streams keep every entry that one of them
would read again. If the newest is damaged, the previous one can therefore resume without loss. The best `keep_best`, by
evaluation accuracy, are kept for their weights: `keep` never removes them, but the streams do not wait for them. (A run
with no other checkpoint can still resume from one: orders whose groups are gone are issued again.)

An accuracy counts from the first checkpoint after its evaluation finishes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Retention:
    """Retention limits: the newest `keep` checkpoints (at least 1) and the best `keep_best`."""

    keep: int
    keep_best: int = 0

    def resumable(self, versions: Iterable[int]) -> list[int]:
        """Return the versions kept for resuming, ascending."""
        return sorted(set(versions))[-self.keep :]

    def survivors(self, versions: Iterable[int], accuracies: Mapping[int, float]) -> set[int]:
        """Return the versions to keep, given the known accuracies by version; a tie goes to the later version."""
        present = set(versions)
        evaluated = sorted(present & accuracies.keys(), key=lambda version: (accuracies[version], version))
        best = evaluated[-self.keep_best :] if self.keep_best else []
        return {*self.resumable(present), *best}
