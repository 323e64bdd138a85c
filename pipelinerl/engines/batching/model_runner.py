"""`ModelRunner`: the only interface between batching and arrays. torch, numpy and JAX each implement it once.

A runner holds `slots` rows. A row is one sequence: its KV cache, the token to feed next, and its sampling parameters.
Rows in use are always 0..B-1 without holes, so one decode step is one dense batch of B rows. Only `decode` samples.
`prefill` computes the cache of everything *before* a row's next token, and the row then joins the next step. The same
function therefore serves new prompts, samples that start later than the rest of their group, and recomputation after a
weight update.

Every call comes from one thread, except `staging` and `finish_staging`, which any thread may call.

Each row's next token and sampling parameters are kept in a `RowTable`, small arrays on the host. Every decode step
returns to the host anyway, so keeping them on the device would save nothing; a runner on the CPU reads them in place.
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
    """Request to compute the cache of `token_ids` (at positions 0, 1, …) once and copy it to each of `rows`."""

    token_ids: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class RowState:
    """The next token and the sampling parameters of a row.

    Attributes:
        token_id: fed at the next step, at `position`; the cache holds everything before it.
        noise_key: u64 key of the row's noise; `pipelinerl.rng.uniform(noise_key, t)` is the noise of the t-th sampled
            token.
        num_sampled: the number of tokens of the answer that are already sampled, so the next token has t = num_sampled.
        temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1 keeps every token. min_p: 0 keeps every token.
        num_top: the number of likeliest tokens to report.
        change: the change to the row's logits; None for no change.
        sampled: the tokens of the answer that are already sampled.
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
    """A model with room for `slots` sequences, one per row, of at most `context_length` tokens each."""

    @property
    def top_logprobs(self) -> Mapping[int, TopTokens]:
        """The likeliest tokens of the last step, by row; only rows that report likeliest tokens have an entry."""
        ...

    def reserve(self, num_rows: int) -> bool:
        """Make room for the next token of rows 0..num_rows-1; return False if a row must be preempted first."""
        ...

    def release(self, rows: Sequence[int]) -> None:
        """Free the cache of `rows`, which have ended; called before `move`."""
        ...

    def clear(self, rows: Sequence[int]) -> None:
        """Overwrite the cache of `rows` with finite numbers, because even masked NaNs spoil attention: 0 · NaN is
        NaN.
        """
        ...

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Fill the cache of the named rows. The tokens that these rows feed next stay the same."""
        ...

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` of the cache of row `source` to each of `rows`."""
        ...

    def place(self, states: Sequence[RowState]) -> None:
        """Set the next token and the sampling parameters of the rows that `states` name."""
        ...

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` with all their state to rows `targets`, pairwise; no row is both a source and a
        target.
        """
        ...

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Run one step of rows 0..num_rows-1; return the sampled token ids and their log-probs.

        The log-probs are those of the distribution sampled from. Each row feeds its sampled token at the next step. A
        row whose logits are no distribution (NaN or +inf among them) has a NaN log-prob and some token of the
        vocabulary; the other rows are unaffected.
        """
        ...

    def swap(self) -> None:
        """Make the staged weights current, at a cost independent of their size. The old weights may be overwritten."""
        ...


def top_tokens(token_ids: NDArray[Any], logprobs: NDArray[Any], count: int) -> TopTokens:
    """Return the first `count` tokens with a non-zero probability; `token_ids` [N] are one row's, likeliest first."""
    pairs = zip(token_ids[:count].tolist(), logprobs[:count].tolist(), strict=True)
    return [(token_id, logprob) for token_id, logprob in pairs if logprob > -math.inf]


@final
class RowTable:
    """Arrays [rows], one for each field of `RowState`; a runner reads slices of these arrays.

    Args:
        rows: the number of rows.
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
        self.any_change = False
        """True if any row may change a logit, as of the last `place`."""
        self.any_min_p = False
        """True if any row has a `min_p`, as of the last `place`."""
        self.most_top = 0
        """The largest `num_top`, as of the last `place`."""
        self._num_sampled = np.zeros(rows, dtype=np.int64)
        self._noise_keys = np.zeros(rows, dtype=np.uint64)

    def place(self, states: Sequence[RowState]) -> None:
        """Set the next token and the sampling parameters of the rows that `states` name."""
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
        """Set the rarely used parameters; skipped while no row uses any of them."""
        self.min_p[rows] = [state.min_p for state in states]
        self.num_top[rows] = [state.num_top for state in states]
        self.any_min_p, self.most_top = bool(self.min_p.any()), int(self.num_top.max())
        for state in states:
            self.changes.place(state.row, state.change, state.sampled)
        self.any_change = bool(self.changes)
        self._has_extras = self.any_change or self.any_min_p or self.most_top > 0

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> int:
        """Move rows `sources` to rows `targets`, pairwise; no row is both. Return the longest cache length among the
        moved rows.
        """
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
        """Return the noise in [0, 1) with which `rows` sample their next token."""
        return rng.uniform(self._noise_keys[rows], self._num_sampled[rows])

    def keep_whole(self, rows: slice) -> bool:
        """Return whether none of `rows` truncates or changes its distribution, or reports likeliest tokens."""
        truncates = self.any_min_p or bool((self.top_k[rows] > 0).any() or (self.top_p[rows] < 1).any())
        return not (truncates or self.any_change or self.most_top)

    def advance(self, rows: slice, sampled: NDArray[Any]) -> None:
        """Advance `rows` by one position: each row feeds its token in `sampled` (int, one for each row) next."""
        self.feeds[rows] = sampled
        self.positions[rows] += 1
        self._num_sampled[rows] += 1
        if self.any_change:
            self.changes.count(sampled)

    def top_of(self, token_ids: NDArray[Any], logprobs: NDArray[Any]) -> dict[int, TopTokens]:
        """Return the likeliest tokens of each row that reports likeliest tokens.

        Args:
            token_ids: the `most_top` likeliest tokens of every row [B, most_top].
            logprobs: the log-probs of these tokens [B, most_top].
        """
        return {
            int(row): top_tokens(token_ids[row], logprobs[row], int(self.num_top[row]))
            for row in self.num_top[: len(token_ids)].nonzero()[0]
        }

    def clear(self) -> None:
        """Reset all rows to the unused state."""
        for column in (self.feeds, self.positions, self._num_sampled):
            column[:] = 0
