"""Sampling of a batch of logits in JAX: temperature, top-k, top-p, inverse CDF, and the log-probs of sampled tokens.

A row's token depends only on its logits, parameters and noise. Its log-prob is fp32 and that of the distribution
sampled from. For equal logits the token equals that of every other engine, because noise and cumulative sums are fp64
(which a TPU emulates). The caller knows whether any row truncates its distribution; `truncates` selects between a
program with truncation and a faster one without.

A row whose logits hold NaN or +inf, or nothing above -inf, has no distribution: its log-prob is NaN and its token is
any of the vocabulary; the other rows are unaffected.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipelinerl.engines.batching.logit_changes import LogitChanges

#: Number of tokens per block of the cumulative distribution; the search finds the block first, then the token in it.
_BLOCK: Final = 1024


class SampledBatch(NamedTuple):
    """Token ids i32 [B] and log-probs f32 [B]; optionally the likeliest ids i32 [B, K] and their log-probs f32 [B,
    K].
    """

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
    num_top: int = 0,
) -> SampledBatch:
    """Sample a token of each row.

    Temperature applies first. Then only the `top_k` likeliest tokens and tokens of at least `min_p` times the highest
    probability are kept. These are renormalised, and only the fewest likeliest tokens that reach `top_p` together are
    kept.

    Args:
        logits: f32 [B, V].
        temperature: f32 [B]; 0 is greedy, and then the log-probs are those of the whole distribution at temperature 1.
        top_k: i32 [B], 0 keeps every token. top_p: f32 [B], 1 keeps every token.
        noise: f64 [B] in [0, 1).
        truncates: True if any row has a top-k, top-p or min-p that could drop a token.
        min_p: f32 [B], 0 keeps every token.
        num_top: the number of likeliest tokens to report; each number compiles a separate program.
    """
    with jax.enable_x64(True):  # in this call only; JAX would otherwise convert fp64 to fp32
        return _sample(logits, temperature, top_k, top_p, min_p, noise, truncates=truncates, num_top=num_top)


def add_to_logits(logits: Array, changes: LogitChanges, num_rows: int) -> Array:
    """Return logits f32 [B, V] with the changes of rows below `num_rows` added.

    The number of changes is padded to a power of two, so that few programs are compiled.
    """
    rows, token_ids, values = changes.of(num_rows)
    size = 1 << max(len(rows) - 1, 0).bit_length()
    padding = (0, size - len(rows))
    # Padding refers to a row that does not exist, so JAX drops it.
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
    noise: Array,
    *,
    truncates: bool,
    num_top: int,
) -> SampledBatch:
    greedy = temperature == 0
    # Shift before the division, which magnifies rounding errors: the likeliest token is at exactly 0.
    scaled = (logits - logits.max(axis=-1, keepdims=True)) / jnp.where(greedy, 1.0, temperature)[:, None]
    logprobs = scaled - jnp.log(jnp.exp(scaled).sum(axis=-1, keepdims=True))
    if truncates:
        drops = ((top_k > 0) | (top_p < 1) | (min_p > 0)) & ~greedy
        logprobs = jnp.where(drops[:, None], _truncated(logprobs, top_k, top_p, min_p), logprobs)
    # In a row without a distribution the search may end beyond the vocabulary.
    sampled = jnp.minimum(_inverse_cdf(logprobs, noise), logprobs.shape[1] - 1)
    token_ids = jnp.where(greedy, logprobs.argmax(axis=-1), sampled)
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    if not num_top:
        return SampledBatch(token_ids.astype(jnp.int32), chosen)
    top, top_ids = jax.lax.top_k(logprobs, min(num_top, logprobs.shape[1]))
    return SampledBatch(token_ids.astype(jnp.int32), chosen, top_ids, top)


def _truncated(logprobs: Array, top_k: Array, top_p: Array, min_p: Array) -> Array:
    """Return log-probs [B, V] after top-k, min-p and top-p, renormalised; dropped tokens have -inf, ties keep the lower
    id.
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
    ordered = ordered - jax.nn.logsumexp(ordered, axis=-1, keepdims=True)
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
    # The two sums may round differently at a block's end: stay within the tokens of non-zero probability.
    rest = jnp.minimum(target - before, jnp.nextafter(inner[:, -1:], jnp.zeros_like(before)))
    return block[:, 0] * width + jnp.sum(inner <= rest, axis=-1)
