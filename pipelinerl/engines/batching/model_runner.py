"""`ModelRunner`: the one seam between batching and arrays. torch, numpy and JAX each implement it once.

A runner holds `slots` rows. A row is one sequence: its KV cache, the token to feed next, and how to sample. Rows in use
are always 0..B-1 without holes, so that one decode step is one dense batch of B rows. Sampling happens in `decode`
alone: `prefill` computes the cache of everything *before* a row's next token, and the row then joins the next step.
One function therefore serves prompts, samples that join their group late, and recomputation after a weight update.

Every call comes from one thread, except `staging` and `finish_staging`, which may be called from any.

What each row feeds next and how it samples lies in a `RowTable`, small arrays on the host. Every decode step returns to
the host anyway, so nothing is saved by keeping them on the device; a runner on the CPU reads them in place.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from numpy.typing import DTypeLike, NDArray

from pipelinerl import rng
from pipelinerl.engines.batching.logit_changes import LogitChange, LogitChanges
from pipelinerl.engines.batching.sample_loop import ServedModel
from pipelinerl.engines.batching.sequence import TopTokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute the cache of `token_ids` (at positions 0, 1, …) once and give it to each of `rows`."""

    token_ids: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowState:
    """What a row feeds at its first step and how it samples.

    Attributes:
        token_id: fed at the next step, at `position`; the cache holds everything before it.
        noise_key: u64 key of its noise; `pipelinerl.rng.uniform(noise_key, t)` is the noise of its t-th sampled token.
        num_sampled: the t of its next token: how many of its answer were sampled before.
        temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1 keeps every token. min_p: 0 keeps every token.
        num_top: how many of the likeliest tokens are reported besides.
        change: what is added to its logits; None for nothing.
        sampled: the tokens of its answer that were sampled before.
    """

    row: int
    token_id: int
    position: int
    noise_key: int
    temperature: float
    top_p: float
    top_k: int
    num_sampled: int = 0
    min_p: float = 0.0
    num_top: int = 0
    change: LogitChange | None = None
    sampled: Sequence[int] = ()


class ModelRunner(ServedModel, Protocol):
    """A model with room for `slots` sequences, each a row, of at most `context_length` tokens each."""

    @property
    def top_logprobs(self) -> Mapping[int, TopTokens]:
        """Of the last step, the likeliest tokens of the rows that want any reported, by row."""
        ...

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Fill the cache of the named rows. Does not touch what they feed next."""
        ...

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Give each of `rows` the first `num_tokens` of the cache of row `source`."""
        ...

    def place(self, states: Sequence[RowState]) -> None:
        """Set what the named rows feed next and how they sample."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move whole rows; no row is both a source and a target."""
        ...

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """One step of rows 0..num_rows-1: the sampled token ids and their log-probs, of the distribution sampled from.

        Each row then feeds what it sampled. A row whose logits are no distribution (NaN or +inf among them) has a NaN
        log-prob and some token of the vocabulary; the other rows are not touched by it.
        """
        ...

    def swap(self) -> None:
        """Make the staged weights current; the cost does not depend on their size. The old ones may be overwritten."""
        ...


def top_tokens(token_ids: NDArray[Any], logprobs: NDArray[Any], count: int) -> TopTokens:
    """The first `count` tokens that can be sampled, likeliest first, of the first few [N] of a row."""
    pairs = zip(token_ids[:count].tolist(), logprobs[:count].tolist(), strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf]


@final
class RowTable:
    """One array [rows] for each column of `RowState`; a runner reads slices of them.

    Args:
        rows: how many there are.
        ids: dtype of token ids, positions and `top_k`, which go to the model or to its sampler.
    """

    def __init__(self, rows: int, *, ids: DTypeLike = np.int64) -> None:
        self.feeds: NDArray[Any] = np.zeros(rows, dtype=ids)
        self.positions: NDArray[Any] = np.zeros(rows, dtype=ids)
        self.temperature = np.ones(rows, dtype=np.float32)
        self.top_p = np.ones(rows, dtype=np.float32)
        self.top_k: NDArray[Any] = np.zeros(rows, dtype=ids)
        self.min_p = np.zeros(rows, dtype=np.float32)
        self.num_top = np.zeros(rows, dtype=np.int64)
        self.changes = LogitChanges()
        self._has_extras = False
        self.any_min_p = False
        """Whether any row has a `min_p`, as of the last `place`."""
        self.most_top = 0
        """The largest `num_top`, as of the last `place`."""
        self._num_sampled = np.zeros(rows, dtype=np.int64)
        self._noise_keys = np.zeros(rows, dtype=np.uint64)

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
        if self._has_extras or any(state.min_p or state.num_top or state.change for state in states):
            self._place_extras(rows, states)

    def _place_extras(self, rows: list[int], states: Sequence[RowState]) -> None:
        """Set what few requests ask for; left out as long as no row has any of it."""
        self.min_p[rows] = [state.min_p for state in states]
        self.num_top[rows] = [state.num_top for state in states]
        self.any_min_p, self.most_top = bool(self.min_p.any()), int(self.num_top.max())
        for state in states:
            self.changes.place(state.row, state.change, state.sampled)
        self._has_extras = self.any_min_p or self.most_top > 0 or bool(self.changes)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> int:
        """Move whole rows, none of which is both a source and a target; returns the longest cache that they have."""
        taken, put = list(sources), list(targets)
        for column in (self.feeds, self.positions, self.temperature, self.top_p, self.top_k):
            column[put] = column[taken]
        for column in (self._num_sampled, self._noise_keys):
            column[put] = column[taken]
        if self._has_extras:
            for column in (self.min_p, self.num_top):
                column[put] = column[taken]
            self.changes.move(taken, put)
        return int(self.positions[put].max())

    def noise(self, rows: slice) -> NDArray[np.float64]:
        """The noise in [0, 1) that `rows` sample their next token with."""
        return rng.uniform(self._noise_keys[rows], self._num_sampled[rows])

    def advance(self, rows: slice, sampled: NDArray[Any]) -> None:
        """Let `rows` feed what they have `sampled` (int, one for each row), one position further on."""
        self.feeds[rows] = sampled
        self.positions[rows] += 1
        self._num_sampled[rows] += 1
        if self.changes:
            self.changes.count(sampled)

    def top_of(self, token_ids: NDArray[Any], logprobs: NDArray[Any]) -> dict[int, TopTokens]:
        """For each row that wants any, its likeliest tokens, of the first `most_top` [B, most_top] of every row."""
        return {
            int(row): top_tokens(token_ids[row], logprobs[row], int(self.num_top[row]))
            for row in self.num_top[: len(token_ids)].nonzero()[0]
        }

    def clear(self) -> None:
        """Forget what was fed and sampled, as if no row had ever been used."""
        for column in (self.feeds, self.positions, self._num_sampled):
            column[:] = 0
