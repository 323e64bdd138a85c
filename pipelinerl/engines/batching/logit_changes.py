"""Per-request changes to logits before sampling: a bias per token, and penalties for tokens already sampled.

Both follow OpenAI's API. If a choice has already sampled a token n > 0 times, the token's logit is lowered by `n *
frequency_penalty + presence_penalty`. Changes are rare and sparse, so they are kept as triples (row, token, value).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class LogitChange:
    """The change that one request makes to logits."""

    bias: Mapping[int, float]
    frequency_penalty: float
    presence_penalty: float

    @property
    def penalizes(self) -> bool:
        """True if the change depends on the tokens already sampled."""
        return self.frequency_penalty != 0 or self.presence_penalty != 0


class LogitChanges:
    """The logit changes of all rows of one `ModelRunner`."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[LogitChange, Counter[int]]] = {}

    def __bool__(self) -> bool:
        """Return whether any row may change a logit."""
        return bool(self._rows)

    def place(self, row: int, change: LogitChange | None, sampled: Iterable[int]) -> None:
        """Set the change of `row`; `sampled` are the tokens that the row's answer already has."""
        if change is not None:
            self._rows[row] = (change, Counter(sampled))
        elif self._rows:
            self._rows.pop(row, None)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move the changes of rows `sources` to rows `targets`, pairwise."""
        for source, target in zip(sources, targets, strict=True):
            moved = self._rows.pop(source, None)
            if moved is None:
                self._rows.pop(target, None)
            else:
                self._rows[target] = moved

    def count(self, sampled: NDArray[Any] | Sequence[Sequence[int]]) -> None:
        """Count the token, or tokens, that each of rows 0, 1, … has just sampled, for the penalties."""
        for row, (change, counts) in self._rows.items():
            if row < len(sampled) and change.penalizes:
                counts.update(np.atleast_1d(sampled[row]).tolist())

    def of(
        self, rows: Iterable[int], drafted: Sequence[Iterable[int]] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
        """Return the changes of `rows` and of what they `drafted`: places in `rows` [K], tokens [K], values [K]."""
        places: list[int] = []
        tokens: list[int] = []
        values: list[float] = []
        for place, row in enumerate(rows):
            if row not in self._rows:
                continue
            change, counts = self._rows[row]
            added = _added(change, counts + Counter(drafted[place]) if drafted and change.penalizes else counts)
            places += [place] * len(added)
            tokens += added.keys()
            values += added.values()
        return np.array(places, np.int64), np.array(tokens, np.int64), np.array(values, np.float32)


def _added(change: LogitChange, counts: Mapping[int, int]) -> dict[int, float]:
    added = dict(change.bias)
    if change.penalizes:
        for token, count in counts.items():
            penalty = count * change.frequency_penalty + change.presence_penalty
            added[token] = added.get(token, 0.0) - penalty
    return added
