"""`JaxRunner`: a `ModelRunner` for Llama-family decoders on any device that XLA supports.

The device holds weights and cache; each row's next token and sampling parameters are in a `RowTable` on the host. Every
call runs programs of `engines.jax.program` at one of the few shapes of `Buckets`. `warm_up` compiles all programs
but rare ones, such as truncated sampling, and new weights never compile anything.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Sharding
from numpy.typing import NDArray

from inference_contract.schemas import MOST_TOP_LOGPROBS
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.engines.batching.logit_changes import LogitChanges
from pipelinerl.engines.batching.model_runner import NOTHING_FURTHER, EarlyStep, Prefill, RowState, RowTable
from pipelinerl.engines.batching.sequence import TopTokens
from pipelinerl.models.decoder_config import DecoderConfig, Parameter
from pipelinerl.plugins.jax.decoder import export_order
from pipelinerl.plugins.jax.engine import program as jax_program
from pipelinerl.plugins.jax.engine.program import Cache, DecoderProgram

_LEAST_ROWS: Final = 16
_LEAST_LENGTH: Final = 128


@dataclass(frozen=True, slots=True)
class Buckets:
    """The few sizes to which an engine rounds up, since XLA compiles a program for each shape. Sizes are ascending.

        rows of a step      16, 32, 64, …, up to the number of slots
        lengths             128, 256, 512, …, up to the context: the length of a step's attention, of a padded prompt,
                            or of a copy between rows
        prompts at once     1, 4, 16, … for each of `lengths`, within the prefill's budget of padded tokens

    Doubling wastes less than half of a step's rows and lengths; prompts are computed only once, so fewer sizes suffice.
    The number of programs grows with the logarithms of slots and context.
    """

    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, *, rows: int, context: int, prefill_tokens: int) -> Self:
        """Return the sizes for `rows` rows of `context` tokens and prefills of `prefill_tokens` padded tokens."""
        lengths = _doubling(_LEAST_LENGTH, context)
        at_once = [max(1, min(rows, prefill_tokens // length)) for length in lengths]
        prompts = tuple(tuple(4**i for i in range((most.bit_length() + 1) // 2)) for most in at_once)
        return cls(_doubling(_LEAST_ROWS, rows), lengths, prompts)

    def rows_for(self, rows: int) -> int:
        """Return the smallest compiled number of rows that holds `rows` rows."""
        return self.rows[bisect_left(self.rows, rows)]

    def length_for(self, length: int) -> int:
        """Return the smallest compiled length that holds `length` tokens."""
        return self.lengths[bisect_left(self.lengths, length)]

    def prompts_at(self, length: int) -> tuple[int, ...]:
        """Return the compiled batch sizes of prefills of prompts padded to `length` (one of `lengths`)."""
        return self.prompts[self.lengths.index(length)]


def _doubling(least: int, most: int) -> tuple[int, ...]:
    sizes = [least]
    while sizes[-1] < most:
        sizes.append(2 * sizes[-1])
    return (*sizes[:-1], most)


_NO_TOP: Final[Mapping[int, TopTokens]] = MappingProxyType({})


class JaxRunner:
    """A decoder with its cache and sampler, which owns `weights` and the donated `cache` from now on.

    `prefill_tokens` is the most padded tokens of one prefill; a longer prompt runs alone. With `starts_early`, a step
    starts before the tokens of the previous step are on the host, wherever the loop allows it.
    """

    def __init__(
        self,
        program: DecoderProgram,
        weights: JaxWeights,
        cache: Cache,
        *,
        prefill_tokens: int = 1024,
        starts_early: bool = False,
    ) -> None:
        _, self.slots, self.context_length, *_ = cache.keys.shape
        self.vocab_size = program.config.vocab
        self.cache_bytes = cache.keys.nbytes + cache.values.nbytes
        self.buckets = Buckets.of(rows=self.slots, context=self.context_length, prefill_tokens=prefill_tokens)
        self._program = program
        self._weights = weights
        self._cache = cache
        self._rows = RowTable(self.slots, ids=np.int32)
        self.early_step = EarlyStep(self.slots, is_used=starts_early)
        self.top_logprobs = _NO_TOP
        self.further = NOTHING_FURTHER
        self.route_log = None
        self.scorer = None
        self.room = None

    @property
    def layout(self) -> WeightLayout:
        return self._weights.layout

    # --- rows ----------------------------------------------------------------------------------------------------

    def place(self, states: Sequence[RowState]) -> None:
        """Set the next token and the sampling parameters of the rows that `states` name."""
        self.early_step.drop()
        self._rows.place(states)

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Move rows `sources` with all their state to rows `targets`, pairwise; no row is in both."""
        self._copy(sources, targets, self._rows.move(sources, targets))
        self.early_step.move(sources, targets)

    def reserve(self, num_rows: int) -> bool:
        """Return True without reserving anything: every row always has room for the whole context."""
        return True

    def release(self, rows: Sequence[int]) -> None:
        """Do nothing: the next sequence in a row overwrites its cache."""

    def clear(self, rows: Sequence[int]) -> None:
        self._cache = jax_program.clear(self._cache, self._padded(rows), np.int32(len(rows)))

    def survives(self, error: Exception) -> bool:
        """Return False: the failed program has consumed the donated cache."""
        return False

    def copy_cache(self, source: int, rows: Sequence[int], num_tokens: int) -> None:
        """Copy the first `num_tokens` of the cache of row `source` to each of `rows`."""
        self.early_step.drop()
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
        padded = np.zeros(self.slots, dtype=np.int32)
        padded[: len(rows)] = rows
        return padded

    # --- forward -------------------------------------------------------------------------------------------------

    def prefill(self, prefills: Sequence[Prefill]) -> None:
        """Fill the cache of the named rows, batching prompts of similar length; each prompt is computed once."""
        self.early_step.drop()
        for length, batch in self._batches(prefills):
            token_ids = np.zeros((min(n for n in self.buckets.prompts_at(length) if n >= len(batch)), length), np.int32)
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
        by_length: dict[int, list[Prefill]] = {}
        for prefill in prefills:
            by_length.setdefault(self.buckets.length_for(len(prefill.token_ids)), []).append(prefill)
        for length, alike in by_length.items():
            most = self.buckets.prompts_at(length)[-1]
            yield from ((length, alike[start : start + most]) for start in range(0, len(alike), most))

    def decode(self, num_rows: int) -> tuple[list[int], list[float]]:
        """Run one step of rows 0..num_rows-1, with additional rows up to a compiled size, whose results are unused."""
        rows, used = self._rows, slice(0, num_rows)
        self.top_logprobs = _NO_TOP
        step, order = self.early_step.take(num_rows)
        if step is None:
            step = self._start(num_rows)
        if order is None and self._may_start_early(num_rows, step):
            self.early_step.keep(self._start(num_rows, after=step))
        of_rows = used if order is None else order
        if step.top_ids is not None:
            self.top_logprobs = rows.top_of(np.asarray(step.top_ids)[used], np.asarray(step.top_logprobs)[used])
        sampled, logprobs = np.asarray(step.token_ids)[of_rows], np.asarray(step.logprobs)[of_rows]
        rows.advance(used, sampled)
        return sampled.tolist(), logprobs.tolist()

    def _may_start_early(self, num_rows: int, step: SampledBatch) -> bool:
        """Return True if the step after `step` needs nothing from the host but its rows' positions and noise."""
        used = slice(0, num_rows)
        return (
            self.early_step.allowed
            and self._rows.keep_whole(used)
            and int(self._rows.positions[used].max()) + 1 < self.context_length
            and len(step.token_ids) == self.buckets.rows_for(num_rows)
        )

    def _start(self, num_rows: int, *, after: SampledBatch | None = None) -> SampledBatch:
        """Start a step of rows 0..num_rows-1, which feeds what `after`, a step that may be unfinished, samples."""
        rows, run, used = self._rows, slice(0, self.buckets.rows_for(num_rows)), slice(0, num_rows)
        skipped = int(after is not None)
        positions = rows.positions[run] + np.int32(skipped)
        logits, self._cache = jax_program.decode(
            self._program,
            self._weights.current,
            self._cache,
            rows.feeds[run] if after is None else after.token_ids,
            positions,
            length=self.buckets.length_for(int(positions[used].max()) + 1),
        )
        if rows.any_change:
            logits = add_to_logits(logits, rows.changes, num_rows)
        truncates = (rows.top_k[used] > 0) | (rows.top_p[used] < 1) | (rows.min_p[used] > 0)
        return sample(
            logits,
            temperature=rows.temperature[run].copy(),  # the device may read these arrays after rows have moved
            top_k=rows.top_k[run].copy(),
            top_p=rows.top_p[run].copy(),
            noise=rows.noise(run, skipped=skipped),
            truncates=bool(truncates.any()),
            min_p=rows.min_p[run].copy(),
            policy_logprobs=rows.policy_logprobs[run].copy(),
            num_top=MOST_TOP_LOGPROBS if rows.most_top else 0,
        )

    def warm_up(self) -> None:
        """Run every program once, except rare ones such as truncated sampling, to compile it; resets rows."""
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
        return self._weights.staging()

    def finish_staging(self) -> None:
        self._weights.finish_staging()

    def swap(self) -> None:
        self.early_step.drop()
        self._weights.swap()


# --- sampling ---------------------------------------------------------------------------------------------------------
#
# The sampled token of a row depends only on the row's logits, parameters and noise. Its log-prob, in fp32, is that of
# the distribution sampled from. For equal logits the token equals that of every other engine, because noise and
# cumulative sums are fp64 (which a TPU emulates). `truncates` selects between a program with truncation and a faster
# one without.
#
# A row whose logits contain NaN or +inf, or nothing above -inf, gets a NaN log-prob and an arbitrary token; the other
# rows are unaffected.

#: Tokens per block of the cumulative distribution; the search finds the block first, then the token in it.
_BLOCK: Final = 1024


class SampledBatch(NamedTuple):
    """Token ids i32 [B] and log-probs f32 [B]; optionally, ids and log-probs [B, K] of the likeliest tokens."""

    token_ids: Array
    logprobs: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None


def sample(
    logits: Array,
    *,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    noise: Any,
    truncates: bool,
    min_p: Any = 0.0,
    policy_logprobs: Any = False,
    num_top: int = 0,
) -> SampledBatch:
    """Sample a token of each row, with the filters of `bigram.engine.sample_rows`.

    Args:
        logits: f32 [B, V].
        temperature: f32 [B]; 0 is greedy, and then the log-probs are those of the whole distribution at temperature 1.
        top_k, top_p, min_p: i32, f32, f32 [B]; 0, 1 and 0 keep every token.
        noise: f64 [B] in [0, 1).
        truncates: True if any row has a top-k, top-p or min-p that could drop a token.
        policy_logprobs: bool [B], True in rows that report log-probs from before truncation.
        num_top: the number of likeliest tokens to report; each number compiles a separate program.
    """
    with jax.enable_x64(True):  # enabled only for this call; JAX otherwise converts fp64 to fp32
        filters = (top_k, top_p, min_p, policy_logprobs)
        return _sample(logits, temperature, *filters, noise, truncates=truncates, num_top=num_top)


def add_to_logits(logits: Array, changes: LogitChanges, num_rows: int) -> Array:
    """Add the changes of rows below `num_rows` to logits f32 [B, V]; pad their list, so that few programs compile."""
    rows, token_ids, values = changes.of(range(num_rows))
    size = 1 << max(len(rows) - 1, 0).bit_length()
    padding = (0, size - len(rows))
    # JAX drops the padding, because it refers to a row that does not exist.
    rows = np.pad(rows, padding, constant_values=logits.shape[0])
    return _added(logits, rows.astype(np.int32), np.pad(token_ids, padding).astype(np.int32), np.pad(values, padding))


@jax.jit
def _added(logits: Array, rows: Array, token_ids: Array, values: Array) -> Array:
    return logits.at[rows, token_ids].add(values, mode="drop")


@partial(jax.jit, static_argnames=("truncates", "num_top"))
def _sample(
    logits: Array,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
    policy_logprobs: Array,
    noise: Array,
    *,
    truncates: bool,
    num_top: int,
) -> SampledBatch:
    greedy = temperature == 0
    # Shift before the division, which magnifies rounding errors, so that the likeliest token is at exactly 0.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)[:, None]
    logprobs = scaled - jnp.log(jnp.exp(scaled).sum(axis=-1, keepdims=True))
    if truncates:
        drops = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & ~greedy
        logprobs = jnp.where(drops[:, None], _truncated(logprobs, top_k, top_p, min_p, policy_logprobs), logprobs)
    # In a row with a NaN the search may end beyond the vocabulary.
    sampled = jnp.minimum(_inverse_cdf(logprobs, noise), logprobs.shape[1] - 1)
    token_ids = jnp.where(greedy, logprobs.argmax(axis=-1), sampled)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    if not num_top:
        return SampledBatch(token_ids.astype(jnp.int32), chosen)
    top, top_ids = jax.lax.top_k(logprobs, min(num_top, logprobs.shape[1]))
    return SampledBatch(token_ids.astype(jnp.int32), chosen, top_ids, top)


def _truncated(logprobs: Array, top_k: Array, top_p: Array, min_p: Array, policy_logprobs: Array) -> Array:
    """Apply top-k, min-p and top-p to log-probs [B, V], and renormalise rows without `policy_logprobs`.

    Dropped tokens get -inf; among equally likely tokens, those with the lower ids are kept.
    """
    order = jnp.argsort(logprobs, axis=-1, descending=True, stable=True)
    ordered = jnp.take_along_axis(logprobs, order, axis=1)
    kept = (jnp.arange(logprobs.shape[1]) < top_k[:, None]) | (top_k == 0)[:, None]
    kept &= ordered >= ordered[:, :1] + jnp.log(jnp.broadcast_to(min_p, top_p.shape))[:, None]
    mass = jnp.where(kept, jnp.exp(ordered.astype(jnp.float64)), 0.0)
    before = mass.cumsum(axis=-1) - mass
    # A top-p of 1 keeps all tokens, even if rounding lets the mass before the last tokens reach 1.
    kept &= (before < top_p.astype(jnp.float64)[:, None] * mass.sum(axis=-1, keepdims=True)) | (top_p >= 1)[:, None]
    ordered = jnp.where(kept, ordered, -jnp.inf)
    log_mass = jax.nn.logsumexp(ordered, axis=-1, keepdims=True)
    # A row whose mass is not finite gets NaN in either case.
    whole = jnp.broadcast_to(policy_logprobs, top_p.shape)[:, None] & jnp.isfinite(log_mass)
    ordered = ordered - jnp.where(whole, 0.0, log_mass)
    return jnp.put_along_axis(logprobs, order, ordered, axis=1, inplace=False)


def _inverse_cdf(logprobs: Array, noise: Array) -> Array:
    """Return each row's first token whose cumulative probability exceeds `noise` times the total. Sums are fp64."""
    batch, vocab = logprobs.shape
    width = min(_BLOCK, vocab)
    probs = jnp.pad(jnp.exp(logprobs), ((0, 0), (0, -vocab % width))).reshape(batch, -1, width)
    ends = probs.sum(axis=-1, dtype=jnp.float64).cumsum(axis=-1)
    target = noise[:, None] * ends[:, -1:]
    block = jnp.sum(ends <= target, axis=-1, keepdims=True)
    before = jnp.where(block > 0, jnp.take_along_axis(ends, jnp.maximum(block - 1, 0), axis=1), 0.0)
    inner = jnp.take_along_axis(probs, block[:, :, None], axis=1)[:, 0].astype(jnp.float64).cumsum(axis=-1)
    # The two sums may round differently at a block's end, so stay within the tokens of non-zero probability.
    rest = jnp.minimum(target - before, jnp.nextafter(inner[:, -1:], jnp.zeros_like(before)))
    return block[:, 0] * width + jnp.sum(inner <= rest, axis=-1)


# --- weights ----------------------------------------------------------------------------------------------------------
#
# Parameters have their Hugging Face names, in the order of the JAX and torch trainers. `finish_staging` copies the
# parameters to the device one at a time, while decoding continues; `swap` only exchanges references. Shapes and
# shardings never change, so updates compile nothing.


def layout_of(config: DecoderConfig, dtype: np.dtype[Any]) -> WeightLayout:
    """Return the layout of the parameters of `config` in `dtype`; parameters of layers have an entry per layer."""
    return WeightLayout(
        parameters=tuple(
            ParameterSpec(name=parameter.name_at(layer or 0), shape=parameter.shape, dtype=DType(dtype.name))
            for parameter, layer in export_order(config)
        )
    )


class JaxWeights:
    """The serving and staged weights, stacked over layers, of one dtype; `place` returns a parameter's sharding."""

    def __init__(
        self, config: DecoderConfig, current: Mapping[str, Array], *, place: Callable[[Parameter], Sharding]
    ) -> None:
        self.current: Mapping[str, Array] = current
        self._config = config
        self._place = place
        self._dtype = next(iter(current.values())).dtype
        self.layout = layout_of(config, self._dtype)
        sizes = [spec.num_bytes for spec in self.layout.parameters]
        ends = accumulate(sizes)
        self._spans = {
            spec.name: slice(end - size, end)
            for spec, size, end in zip(self.layout.parameters, sizes, ends, strict=True)
        }
        self._bytes: NDArray[np.uint8] | None = None
        self._staged: Mapping[str, Array] | None = None

    def staging(self) -> NDArray[np.uint8]:
        """Return uint8 [layout.num_bytes] in host memory, allocated at the first call."""
        if self._bytes is None:
            self._bytes = np.empty(self.layout.num_bytes, np.uint8)
        return self._bytes

    def finish_staging(self) -> None:
        """Copy the staged bytes to device arrays; returns when the copies are complete."""
        staged = {}
        for parameter in self._config.parameters:
            parts = [self._array(name, parameter.shape) for name in parameter.names]
            # JAX on a CPU keeps using this memory, so it must be a copy of the staging buffer.
            stacked = parts[0].copy() if parameter.layers is None else np.stack(parts)
            staged[parameter.name] = jax.block_until_ready(jax.device_put(stacked, self._place(parameter)))
        self._staged = staged

    def swap(self) -> None:
        """Serve the staged weights; the old arrays are freed when the step that reads them has ended."""
        assert self._staged is not None, "finish_staging comes before each swap"
        self.current, self._staged = self._staged, None

    def _array(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.staging()[self._spans[name]].view(self._dtype).reshape(shape)
