"""The Llama family (Llama, Mistral, Qwen2, Qwen3) in plain JAX: pure functions of a mapping from names to arrays.

Names and layouts are Hugging Face's, so nothing is renamed or transposed. A parameter of every layer is one array with
a leading dimension of layers and a `*` in its name, over which `lax.scan` runs.

    weights["model.layers.*.self_attn.q_proj.weight"]      [L, H·d, D]

Training and decoding differ in how attention sees other tokens and where weights are stored. Both are arguments of
`hidden_states`: `attend` takes a layer's queries, keys, values and state (a cache, or nothing), `fetch` takes a layer's
weights before they are used (cast, gathered from shards). Everything else is shared.

Letters in shapes: … any leading dimensions, D hidden size, H heads, K key-value heads, d head size, L layers, V tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipelinerl.models.decoder_config import EMBEDDING, HEAD, LAYER, NORM, DecoderConfig

#: Arrays by name; those of one layer without the prefix `model.layers.*.`.
Weights = Mapping[str, Array]
State = TypeVar("State")
#: (query […, H, d], key […, K, d], value […, K, d], state of the layer) → (attended […, H, d], new state).
Attend = Callable[[Array, Array, Array, Any], tuple[Array, Any]]
Fetch = Callable[[dict[str, Array]], dict[str, Array]]


def hidden_states(
    config: DecoderConfig,
    weights: Weights,
    token_ids: Array,
    positions: Array,
    attend: Attend,
    state: State | None = None,
    *,
    fetch: Fetch = lambda layer: layer,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]] = lambda layer: layer,
) -> tuple[Array, State | None]:
    """Run all layers and the last norm.

    Args:
        weights: every parameter of `config.parameters`.
        token_ids, positions: i32 […].
        attend: computes attention alone, after projection and rotation.
        state: a pytree whose arrays have a leading dimension L; each layer takes its slice and returns it changed.
        fetch: applied to a layer's weights inside the loop, and to the others where they are used.
        wrap: applied to the function of one layer, for rematerialisation.

    Returns:
        […, D] in the dtype of the fetched weights, and the new state.
    """
    cos, sin = rotary(config, positions)
    x = embed(weights, token_ids, fetch=fetch)

    def layer(x: Array, inputs: tuple[dict[str, Array], Any]) -> tuple[Array, Any]:
        own, cache = fetch(inputs[0]), inputs[1]
        h = rms_norm(x, own["input_layernorm.weight"], config.norm_eps)
        query, key, value = attention_inputs(config, own, h, cos, sin)
        attended, cache = attend(query, key, value, cache)
        x = x + linear(own, "self_attn.o_proj", attended.reshape(*x.shape[:-1], -1))
        h = rms_norm(x, own["post_attention_layernorm.weight"], config.norm_eps)
        return x + gated_mlp(own, h), cache

    x, state = lax.scan(wrap(layer), x, (layer_weights(weights), state))
    return rms_norm(x, fetch({NORM: weights[NORM]})[NORM], config.norm_eps), state


def layer_weights(weights: Weights) -> dict[str, Array]:
    """Return the stacked parameters by their names within a layer."""
    return {name.removeprefix(LAYER): array for name, array in weights.items() if name.startswith(LAYER)}


def embed(weights: Weights, token_ids: Array, *, fetch: Fetch = lambda layer: layer) -> Array:
    """Return embeddings […, D] of tokens […]."""
    return jnp.take(fetch({EMBEDDING: weights[EMBEDDING]})[EMBEDDING], token_ids, axis=0)


def output_embedding(weights: Weights, *, fetch: Fetch = lambda layer: layer) -> Array:
    """Return the output layer's weight [V, D], which is the input embedding's if they are tied."""
    name = HEAD if HEAD in weights else EMBEDDING
    return fetch({name: weights[name]})[name]


def rotary(config: DecoderConfig, positions: Array) -> tuple[Array, Array]:
    """Return cos and sin f32 […, 1, d/2] of positions […], ready to broadcast over heads (Su et al. 2021)."""
    angles = positions[..., None, None].astype(jnp.float32) * config.rotary.frequencies(config.head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Rotate the pairs (x_i, x_{i + d/2}) of each head of x […, H, d], in fp32, and return x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate((first * cos - second * sin, second * cos + first * sin), axis=-1).astype(x.dtype)


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """Return x / rms(x) · weight over the last dimension; the mean of squares is fp32 (Zhang and Sennrich 2019)."""
    wide = x.astype(jnp.float32)
    scale = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale).astype(x.dtype) * weight.astype(x.dtype)


def linear(layer: Weights, name: str, x: Array) -> Array:
    """Return x […, in] · weightᵀ + bias, if there is one: […, out]."""
    weight = layer[f"{name}.weight"]
    y = jnp.einsum("...i,oi->...o", x, weight)
    bias = layer.get(f"{name}.bias")
    return y if bias is None else y + bias


def attention_inputs(
    config: DecoderConfig, layer: Weights, h: Array, cos: Array, sin: Array
) -> tuple[Array, Array, Array]:
    """Return queries […, H, d] and keys […, K, d], rotated and optionally normed, and values […, K, d]."""
    query, key, value = (
        linear(layer, f"self_attn.{name}_proj", h).reshape(*h.shape[:-1], heads, config.head_dim)
        for name, heads in (("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads))
    )
    if config.qk_norm:
        query = rms_norm(query, layer["self_attn.q_norm.weight"], config.norm_eps)
        key = rms_norm(key, layer["self_attn.k_norm.weight"], config.norm_eps)
    return rotated(query, cos, sin), rotated(key, cos, sin), value


def gated_mlp(layer: Weights, h: Array) -> Array:
    """Return down(silu(gate(h)) · up(h)), […, D]."""
    return linear(
        layer, "mlp.down_proj", jax.nn.silu(linear(layer, "mlp.gate_proj", h)) * linear(layer, "mlp.up_proj", h)
    )


def grouped_attention(query: Array, key: Array, value: Array, visible: Array) -> Array:
    """Return softmax(q·kᵀ / √d)·v, in which each key-value head serves H / K query heads; softmax in fp32.

    Args:
        query: [B, Q, H, d]; key, value: [B, T, K, d].
        visible: bool, broadcast to [B, Q, T]; every query must see at least one position.

    Returns:
        [B, Q, H, d].
    """
    batch, rows, heads, width = query.shape
    grouped = query.reshape(batch, rows, key.shape[2], heads // key.shape[2], width)
    scores = jnp.einsum("bqkgd,btkd->bkgqt", grouped, key, preferred_element_type=jnp.float32) * width**-0.5
    scores = jnp.where(visible[:, None, None], scores, jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    return jnp.einsum("bkgqt,btkd->bqkgd", shares, value).reshape(query.shape)
