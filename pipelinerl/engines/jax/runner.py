"""`JaxRunner`: a `ModelRunner` for Llama-family decoders on any device that XLA supports.

The device holds weights and cache; each row's next token and sampling parameters are in a `RowTable` on the host. Every
call runs programs of `engines.jax.program` at shapes from `engines.jax.buckets`. `warm_up` compiles all programs but
those of truncated sampling, and new weights never compile anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Self, final

import numpy as np
from numpy.typing import NDArray

from inference_contract.schemas import MOST_TOP_LOGPROBS
from inference_contract.weights import WeightLayout
from pipelinerl.engines.batching.model_runner import Prefill, RowState, RowTable
from pipelinerl.engines.batching.sequence import TopTokens
from pipelinerl.engines.jax import program as jax_program
from pipelinerl.engines.jax.program import Cache, DecoderProgram
from pipelinerl.engines.jax.sampling import add_to_logits, sample
from pipelinerl.engines.jax.weights import JaxWeights

_LEAST_ROWS: Final = 16
_LEAST_LENGTH: Final = 128


@final
@dataclass(frozen=True, slots=True)
class Buckets:
    """The few shapes that an engine runs, since XLA compiles a program for each shape.

        rows of a step      16, 32, 64, … slots
        lengths             128, 256, 512, … context: of a step's attention, a padded prompt, a copy
        prompts at once     1, 4, 16, … of a length, within the prefill's budget of padded tokens

    Doubling wastes less than half of a step's rows and lengths; prompts are computed only once, so fewer sizes suffice.
    The number of programs grows with the logarithms of slots and context, and `num_programs` bounds it.

    Sizes are ascending; `prompts[i]` are the numbers of prompts at once for length
    `lengths[i]`.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, *, rows: int, context: int, prefill_tokens: int) -> Self:
        """Return the sizes for `rows` rows of `context` tokens, and prefills of at most `prefill_tokens` padded
        tokens.
        """
        lengths = _doubling(_LEAST_LENGTH, context)
        at_once = [max(1, min(rows, prefill_tokens // length)) for length in lengths]
        prompts = tuple(tuple(4**i for i in range((most.bit_length() + 1) // 2)) for most in at_once)
        return cls(_doubling(_LEAST_ROWS, rows), lengths, prompts)

    @property
    def num_programs(self) -> int:
        """The most programs that are ever compiled: steps, sampling with and without truncation, prefills, copies."""
        steps = len(self.rows) * len(self.lengths) + 2 * len(self.rows)
        return steps + sum(map(len, self.prompts)) + len(self.lengths)

    def rows_for(self, rows: int) -> int:
        """Return the number of rows to run for a step of `rows` rows: the smallest compiled size that holds them."""
        return self.rows[bisect_left(self.rows, rows)]

    def length_for(self, length: int) -> int:
        """Return the smallest length that holds `length` tokens."""
        return self.lengths[bisect_left(self.lengths, length)]

    def prompts_at(self, length: int) -> tuple[int, ...]:
        """Return the possible numbers of prompts, padded to `length` (one of `lengths`), that run at once."""
        return self.prompts[self.lengths.index(length)]


def _doubling(least: int, most: int) -> tuple[int, ...]:
    """Return least, 2 · least, … below `most`, and then `most` itself."""
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*sizes[:-1], most)


_NO_TOP: Final[Mapping[int, TopTokens]] = MappingProxyType({})


@final
class JaxRunner:
    """A decoder with its cache and sampler.

    Args:
        weights: owned by the runner from now on.
        cache: `slots` rows as long as the context; donated to the runner, so the caller may no longer use it.
        prefill_tokens: most padded tokens of one prefill; a longer prompt runs alone.
    """

    def __init__(
        self, program: DecoderProgram, weights: JaxWeights, cache: Cache, *, prefill_tokens: int = 1024
    ) -> None:
        _, self.slots, self.context_length, *_ = cache.keys.shape
        self.vocab_size = program.config.vocab
        self.cache_bytes = cache.keys.nbytes + cache.values.nbytes
        self.buckets = Buckets.of(rows=self.slots, context=self.context_length, prefill_tokens=prefill_tokens)
        self._program = program
        self._weights = weights
        self._cache = cache
        self._rows = RowTable(self.slots, ids=np.int32)
        self.top_logprobs = _NO_TOP
        self.route_log = None
        self.scorer = None
        self.room = None

    @property
    def layout(self) -> WeightLayout:
        """The parameters in the order of their bytes in `staging`."""
        return self._weights.layout

    # --- rows ----------------------------------------------------------------------------------------------------

    def place(self, states: Sequence[RowState]) -> None:
        """Set the next token and the sampling parameters of the rows that `states` name."""
        self._rows.place(states)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` with all their state to rows `targets`, pairwise; no row is both a source and a
        target.
        """
        self._copy(sources, targets, self._rows.move(sources, targets))

    def reserve(self, num_rows: int) -> bool:
        """Return True: every row has room for the whole context."""
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Do nothing: the next sequence in a row overwrites its cache."""

    def clear(self, rows: Sequence[int]) -> None:
        """Set the cache of `rows` to zero."""
        self._cache = jax_program.clear(self._cache, self._padded(rows), np.int32(len(rows)))

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` of the cache of row `source` to each of `rows`."""
        self._copy([source] * len(rows), rows, num_tokens)

    def _copy(self, sources: Sequence[int], targets: Sequence[int], num_tokens: int) -> None:
        self._cache = jax_program.copy(
            self._cache,
            self._padded(sources),
            self._padded(targets),
            np.int32(len(targets)),
            length=self.buckets.length_for(num_tokens),
        )

    def _padded(self, rows: Sequence[int]) -> NDArray[np.int32]:
        """Return `rows` padded with zeros to i32 [slots]."""
        padded = np.zeros(self.slots, dtype=np.int32)
        padded[: len(rows)] = rows
        return padded

    # --- forward -------------------------------------------------------------------------------------------------

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Fill the cache of the named rows, batching prompts of similar length; each prompt is computed once."""
        for length, batch in self._batches(prefills):
            token_ids = np.zeros((_fitting(len(batch), self.buckets.prompts_at(length)), length), dtype=np.int32)
            for index, prefill in enumerate(batch):
                token_ids[index, : len(prefill.token_ids)] = prefill.token_ids
            rows = [row for prefill in batch for row in prefill.rows]
            sources = [index for index, prefill in enumerate(batch) for _ in prefill.rows]
            self._cache = jax_program.prefill(
                self._program,
                self._weights.current,
                self._cache,
                token_ids,
                self._padded(rows),
                self._padded(sources),
                np.int32(len(rows)),
            )

    def _batches(self, prefills: Sequence[Prefill]) -> Iterator[tuple[int, Sequence[Prefill]]]:
        """Yield each padded length with prefills padded to that length, at most as many as may run at once."""
        by_length: dict[int, list[Prefill]] = {}
        for prefill in prefills:
            by_length.setdefault(self.buckets.length_for(len(prefill.token_ids)), []).append(prefill)
        for length, alike in by_length.items():
            most = self.buckets.prompts_at(length)[-1]
            yield from ((length, alike[start : start + most]) for start in range(0, len(alike), most))

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Run one step of rows 0..num_rows-1.

        The number of rows is rounded up to a compiled size; the results of the additional rows are never read.
        """
        rows, run, used = self._rows, slice(0, self.buckets.rows_for(num_rows)), slice(0, num_rows)
        logits, self._cache = jax_program.decode(
            self._program,
            self._weights.current,
            self._cache,
            rows.feeds[run],
            rows.positions[run],
            length=self.buckets.length_for(int(rows.positions[used].max()) + 1),
        )
        if rows.any_change:
            logits = add_to_logits(logits, rows.changes, num_rows)
        truncates = (rows.top_k[used] > 0) | (rows.top_p[used] < 1) | (rows.min_p[used] > 0)
        token_ids, logprobs, top_ids, top_logprobs = sample(
            logits,
            temperature=rows.temperature[run],
            top_k=rows.top_k[run],
            top_p=rows.top_p[run],
            noise=rows.noise(run),
            truncates=bool(truncates.any()),
            min_p=rows.min_p[run],
            num_top=MOST_TOP_LOGPROBS if rows.most_top else 0,
        )
        self.top_logprobs = _NO_TOP
        if top_ids is not None:
            self.top_logprobs = rows.top_of(np.asarray(top_ids)[used], np.asarray(top_logprobs)[used])
        sampled = np.asarray(token_ids)[used]
        rows.advance(used, sampled)
        return sampled.tolist(), np.asarray(logprobs)[used].tolist()

    def warm_up(self) -> None:
        """Run every program once, except truncated sampling, so that no request waits for a compiler.

        Resets the rows to the unused state.
        """
        for length in self.buckets.lengths:
            for prompts in self.buckets.prompts_at(length):
                self.prefill([Prefill([0] * length, [row]) for row in range(prompts)])
            self._copy([], [], length)
            self._rows.positions[:] = length - 1
            for num_rows in self.buckets.rows:
                self._rows.positions[:num_rows] = length - 1
                self.decode(num_rows)
        self._rows.clear()

    # --- weights -------------------------------------------------------------------------------------------------

    def staging(self) -> NDArray[np.uint8]:
        """Return the buffer for the next weights: uint8 [layout.num_bytes], in host memory."""
        return self._weights.staging()

    def finish_staging(self) -> None:
        """Copy the staged weights to the device."""
        self._weights.finish_staging()

    def swap(self) -> None:
        """Make the staged weights current."""
        self._weights.swap()


def _fitting(count: int, sizes: Sequence[int]) -> int:
    """Return the smallest of `sizes` that is at least `count`."""
    return next(size for size in sizes if size >= count)
