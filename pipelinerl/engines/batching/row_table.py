"""`RowTable`: what each row of a runner feeds next and how it samples, in small host arrays.

Every decode step returns to the host anyway, so nothing is saved by keeping them on the device; a runner on the CPU
reads them in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipelinerl import rng
from pipelinerl.engines.batching.model_runner import RowState


@final
class RowTable:
    """One array [slots] for each column of `RowState`; a runner reads slices of them.

    Args:
        slots: number of rows.
        ids: dtype of token ids, positions and `top_k`, which go to the model or to its sampler.
    """

    def __init__(self, slots: int, *, ids: DTypeLike = np.int64) -> None:
        self.feeds: NDArray[Any] = np.zeros(slots, dtype=ids)
        self.positions: NDArray[Any] = np.zeros(slots, dtype=ids)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_p = np.ones(slots, dtype=np.float32)
        self.top_k: NDArray[Any] = np.zeros(slots, dtype=ids)
        self._num_sampled = np.zeros(slots, dtype=np.int64)
        self._noise_keys = np.zeros(slots, dtype=np.uint64)

    def place(self, states: Sequence[RowState]) -> None:
        """Set what the named rows feed next and how they sample."""
        rows = [state.row for state in states]
        self.feeds[rows] = [state.token_id for state in states]
        self.positions[rows] = [state.position for state in states]
        self.temperature[rows] = [state.temperature for state in states]
        self.top_p[rows] = [state.top_p for state in states]
        self.top_k[rows] = [state.top_k for state in states]
        self._num_sampled[rows] = [state.num_sampled for state in states]
        self._noise_keys[rows] = [state.noise_key for state in states]

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> int:
        """Move whole rows, none of which is both a source and a target; returns the longest cache that they have."""
        taken, put = list(sources), list(targets)
        for column in (self.feeds, self.positions, self.temperature, self.top_p, self.top_k):
            column[put] = column[taken]
        for column in (self._num_sampled, self._noise_keys):
            column[put] = column[taken]
        return int(self.positions[put].max())

    def noise(self, rows: slice) -> NDArray[np.float64]:
        """The noise in [0, 1) that `rows` sample their next token with."""
        return rng.uniform(self._noise_keys[rows], self._num_sampled[rows])

    def advance(self, rows: slice, sampled: NDArray[Any]) -> None:
        """Let `rows` feed what they have `sampled` (int, one for each row), one position further on."""
        self.feeds[rows] = sampled
        self.positions[rows] += 1
        self._num_sampled[rows] += 1

    def clear(self) -> None:
        """Forget what was fed and sampled, as if no row had ever been used."""
        for column in (self.feeds, self.positions, self._num_sampled):
            column[:] = 0
