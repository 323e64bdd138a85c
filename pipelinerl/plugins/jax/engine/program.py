"""The device programs of a JAX engine, which compute prompts, run one step of all rows, and copy between rows.

The cache has a slot for each row, as long as the context. Every function is compiled once for each combination of
argument shapes and `length`; all of these are sizes from the short lists of `Buckets`. The number of copied rows is a
traced argument, so it needs no further programs. The cache is donated to each call, so it is changed in place. Within a
step, a layer reads the slots and returns its new entries, which are stored once after all layers.

Letters in shapes: B rows of a step, P prompts of T tokens, S slots, C context, L layers, K key-value heads of d numbers
each, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Sharding

from pipelinerl.engines.options import EngineOptions
from pipelinerl.models.decoder_config import DecoderConfig
from pipelinerl.plugins.jax.decoder import grouped_attention, hidden_states, output_embedding
from pipelinerl.plugins.jax.splash import LANES, splash_attention


class PromptAttention(StrEnum):
    """Implementations of causal attention within prompts.

        plain     all scores [P, H, T, T] in fp32: any platform, any length
        splash    `models.jax_splash`, blocks of scores in on-chip memory: padded lengths that are multiples of `LANES`,
                  others use `plain`; not run on a TPU so far

    The kernel is used for prompts only, because their scores grow with the square of the length. A decode step has one
    query per row, so reading the cache takes most of its time, and XLA's own fusion handles it.
    """

    PLAIN = "plain"
    SPLASH = "splash"

    @classmethod
    def on(cls, platform: str, *, devices: int, windows: bool = False) -> PromptAttention:
        """Return `splash` for one TPU without windows, else `plain`: its kernel cannot be split, nor its mask vary."""
        return cls.SPLASH if platform == "tpu" and devices == 1 and not windows else cls.PLAIN

    def causal(self, query: Array, key: Array, value: Array, reach: Array | None = None) -> Array:
        """Return causal attention [P, T, H, d] over keys and values [P, T, K, d], to the last `reach` i32 [] tokens."""
        length = query.shape[1]
        if self is PromptAttention.SPLASH and length % LANES == 0 and reach is None:
            return splash_attention(query, key, value)
        distance = jnp.arange(length)[:, None] - jnp.arange(length)
        seen = distance >= 0 if reach is None else (distance >= 0) & (distance < reach)
        return grouped_attention(query, key, value, seen[None])


Weights = Mapping[str, Array]


class Cache(NamedTuple):
    """Keys and values, each [L, S, C, K, d]."""

    keys: Array
    values: Array


@dataclass(frozen=True, slots=True)
class DecoderProgram:
    """One decoder and its prompt attention, for which the compiled functions are specialised."""

    config: DecoderConfig
    prompts: PromptAttention


def empty_cache(config: DecoderConfig, options: EngineOptions, sharding: Sharding) -> Cache:
    """Return a cache for every slot, all zeros."""
    shape = (config.layers, options.slots, options.context_length, config.kv_heads, config.head_dim)
    keys, values = (jnp.zeros(shape, jnp.dtype(options.dtype), device=sharding) for _ in Cache._fields)
    return Cache(keys, values)


@partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(
    program: DecoderProgram, weights: Weights, cache: Cache, token_ids: Array, rows: Array, sources: Array, count: Array
) -> Cache:
    """Compute prompts and store prompt `sources[i]` in row `rows[i]` of the cache, for i below `count`.

    Args:
        token_ids: i32 [P, T], padded on the right; cache entries of padding are overwritten before they are read.
        rows, sources: i32 [S]. count: i32 [].
    """
    prompts, length = token_ids.shape

    def attend(query: Array, key: Array, value: Array, _: Any, reach: Array | None = None) -> tuple[Array, Any]:
        return program.prompts.causal(query, key, value, reach), (key, value)

    positions = jnp.broadcast_to(jnp.arange(length), (prompts, length))
    _, computed = _run(program, weights, token_ids, positions, attend)

    def store(i: Array, cache: Cache) -> Cache:
        return Cache(
            *(_put(old, _row(new, sources[i], length), rows[i]) for old, new in zip(cache, computed, strict=True))
        )

    return lax.fori_loop(0, count, store, cache)


@partial(jax.jit, static_argnames="length", donate_argnums=0)
def copy(cache: Cache, sources: Array, targets: Array, count: Array, *, length: int) -> Cache:
    """Copy the first `length` entries of row `sources[i]` to row `targets[i]`, i below `count`; both are i32 [S]."""

    def one(i: Array, cache: Cache) -> Cache:
        return Cache(*(_put(entries, _row(entries, sources[i], length), targets[i]) for entries in cache))

    return lax.fori_loop(0, count, one, cache)


@partial(jax.jit, donate_argnums=0)
def clear(cache: Cache, rows: Array, count: Array) -> Cache:
    """Set row `rows[i]` to zero, for i below `count`; `rows` are i32 [S]."""

    def one(i: Array, cache: Cache) -> Cache:
        length = cache.keys.shape[2]
        return Cache(*(_put(entries, jnp.zeros_like(_row(entries, rows[i], length)), rows[i]) for entries in cache))

    return lax.fori_loop(0, count, one, cache)


@partial(jax.jit, static_argnums=0, static_argnames="length", donate_argnums=2)
def decode(
    program: DecoderProgram, weights: Weights, cache: Cache, token_ids: Array, positions: Array, *, length: int
) -> tuple[Array, Cache]:
    """Return logits f32 [B, V] after one token for each of rows 0..B-1, and the updated cache. `token_ids` and
    `positions` are i32 [B]; every row attends only to positions below `length`.
    """
    config, batch = program.config, len(token_ids)
    order = jnp.arange(length)
    own = (order == positions[:, None])[..., None, None]
    distance = (positions[:, None] - order)[:, None, :]

    def attend(query: Array, key: Array, value: Array, layer: Array, reach: Array | None = None) -> tuple[Array, Any]:
        seen = distance >= 0 if reach is None else (distance >= 0) & (distance < reach)
        size = (1, batch, length, config.kv_heads, config.head_dim)
        keys, values = (lax.dynamic_slice(entries, (layer, 0, 0, 0, 0), size)[0] for entries in cache)
        keys, values = jnp.where(own, key, keys), jnp.where(own, value, values)
        return grouped_attention(query, keys, values, seen), (key[:, 0], value[:, 0])

    hidden, added = _run(program, weights, token_ids[:, None], positions[:, None], attend)
    with _exact():
        logits = jnp.einsum("bd,vd->bv", hidden[:, 0], output_embedding(weights), preferred_element_type=jnp.float32)
    rows = jnp.arange(batch)
    return logits, Cache(*(old.at[:, rows, positions].set(new) for old, new in zip(cache, added, strict=True)))


def _run(
    program: DecoderProgram, weights: Weights, token_ids: Array, positions: Array, attend: Any
) -> tuple[Array, Any]:
    with _exact():
        return hidden_states(program.config, weights, token_ids, positions, attend, jnp.arange(program.config.layers))


def _exact() -> Any:
    """Return a context in which a TPU multiplies fp32 exactly, instead of in bf16; products in bf16 stay bf16."""
    return jax.default_matmul_precision("float32")


def _row(entries: Array, row: Array, length: int) -> Array:
    return lax.dynamic_slice_in_dim(entries, row, 1, axis=1)[:, :, :length]


def _put(entries: Array, new: Array, row: Array) -> Array:
    return lax.dynamic_update_slice(entries, new, (0, row, 0, 0, 0))
