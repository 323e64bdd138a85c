"""`ModelRunner`: the one seam between batching and arrays. torch, numpy and JAX each implement it once.

A runner holds `slots` rows. A row is one sequence: its KV cache, the token to feed next, and how to sample. Rows in use
are always 0..B-1 without holes, so that one decode step is one dense batch of B rows. Sampling happens in `decode`
alone: `prefill` computes the cache of everything *before* a row's next token, and the row then joins the next step.
One function therefore serves prompts, samples that join their group late, and recomputation after a weight update.

Every call comes from one thread, except `staging` and `finish_staging`, which may be called from any.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pipelinerl.engines.batching.sample_loop import ServedModel


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
        temperature: 0 is greedy. top_k: 0 keeps every token. top_p: 1 keeps every token.
    """

    row: int
    token_id: int
    position: int
    noise_key: int
    temperature: float
    top_p: float
    top_k: int
    num_sampled: int = 0


class ModelRunner(ServedModel, Protocol):
    """A model with room for `slots` sequences, each a row, of at most `context_length` tokens each."""

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
