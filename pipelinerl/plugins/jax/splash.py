"""Causal attention on TPUs by JAX's splash kernel, `jax.experimental.pallas.ops.tpu.splash_attention`.

The kernel keeps blocks of scores in on-chip memory, in forward and backward, and skips blocks above the diagonal. Each
key-value head serves its group of query heads without being copied. Scores, softmax and sums are fp32; products of bf16
arrays are computed in one bf16 pass.

The kernel was tested in Pallas's interpreters on a CPU, where outputs and gradients agree with dense attention, and it
was lowered for TPUs on a machine without a TPU. It has not been compiled or run on a TPU.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from math import gcd
from typing import Final

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.splash_attention import (
    BlockSizes,
    CausalMask,
    MultiHeadMask,
    SegmentIds,
    make_splash_mha_single_device,
)

#: Rows of the kernel must be a multiple of this length, in tokens.
LANES: Final = 128
#: Block length in tokens, as in MaxText and axlearn: a block's fp32 scores take 1 MiB of the kernel's default 16 MiB.
_BLOCK: Final = 512
#: Maximum number of partial gradients of the queries that the fused backward pass may store.
_MOST_PARTIAL_GRADIENTS: Final = 4


def splash_attention(query: Array, key: Array, value: Array, segment_ids: Array | None = None) -> Array:
    """Return causal attention [R, C, H, d] within the segments of each row, all on one device.

    Args:
        query: [R, C, H, d]; key, value: [R, C, K, d], where K divides H. C is a multiple of `LANES`; d is arbitrary.
        segment_ids: i32 [R, C]; tokens see only tokens with the same id. None: each row is one segment.
    """
    kernel = causal_kernel(query.shape[1], query.shape[2])
    # The kernel does not scale scores, so scale the queries. In bf16 this rounds, unless d is a power of four.
    scaled = (query.astype(jnp.float32) * query.shape[-1] ** -0.5).astype(query.dtype)
    arrays = (jnp.moveaxis(array, 1, 2) for array in (scaled, key, value))
    segments = None if segment_ids is None else SegmentIds(segment_ids, segment_ids)
    # Callers ask XLA for exact products of fp32 arrays. With this setting, the TPU compiler rejects products of bf16
    # arrays inside a kernel ("Bad lhs type in tpu.matmul", jax issue 21408).
    with jax.default_matmul_precision("bfloat16") if query.dtype == jnp.bfloat16 else nullcontext():
        attended: Array = jax.vmap(kernel)(*arrays, segments)
    return jnp.moveaxis(attended, 1, 2)


def causal_kernel(columns: int, heads: int) -> Callable[..., Array]:
    """Return the kernel for one row: (query [H, C, d], key [K, C, d], value [K, C, d], segments) → [H, C, d]."""
    mask = MultiHeadMask([CausalMask((columns, columns))] * heads)
    return make_splash_mha_single_device(mask, block_sizes=block_sizes(columns))


def block_sizes(columns: int) -> BlockSizes:
    """Return the block sizes for rows of `columns` tokens, a multiple of `LANES`; they suit head sizes up to 256.

    A short row uses one fused backward kernel, which computes the scores only once. That kernel stores a partial
    gradient of all queries for each block of keys. For longer rows these would take too much memory, so two kernels
    are used: one for the gradient of the queries, one for those of the keys and values.
    """
    block = gcd(columns, _BLOCK)
    fused = columns <= _MOST_PARTIAL_GRADIENTS * block
    separate = None if fused else block
    return BlockSizes(
        block_q=block,
        block_kv=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_q_dq=separate,
        block_kv_dq=separate,
        use_fused_bwd_kernel=fused,
    )
