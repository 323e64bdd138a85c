"""Causal attention within prompts: a kernel of JAX's own library on TPUs, plain matrix products elsewhere.

    plain     all scores [P, H, T, T] in fp32: any platform, any length
    flash     `jax.experimental.pallas.ops.tpu.flash_attention`: blocks of scores in on-chip memory

The kernel is only for prompts, because the scores of a prompt grow with the square of its length. A decode step has one
query for each row: its scores are small, reading the cache takes most of its time, and XLA's own fusion handles it on
every platform.

The kernel has been run in Pallas's TPU interpreter on a CPU, where it agrees with `plain`; it has not run on a TPU.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

import jax.numpy as jnp
from jax import Array
from jax.experimental.pallas.ops.tpu.flash_attention import flash_attention

from pipelinerl.models.jax.decoder import grouped_attention

#: The kernel's block size. Prompts whose padded length is not a multiple of it use plain products.
_BLOCK: Final = 128


class PromptAttention(StrEnum):
    """Implementations of attention within prompts."""

    PLAIN = "plain"
    FLASH = "flash"

    @classmethod
    def on(cls, platform: str, *, devices: int) -> PromptAttention:
        """Return the implementation for `devices` devices of a platform. Several devices need plain products: XLA
        cannot split the kernel.
        """
        return cls.FLASH if platform == "tpu" and devices == 1 else cls.PLAIN

    def causal(self, query: Array, key: Array, value: Array) -> Array:
        """Return causal attention [P, T, H, d] of queries [P, T, H, d] over keys and values [P, T, K, d]."""
        length, heads = query.shape[1:3]
        if self is PromptAttention.PLAIN or length % _BLOCK:
            order = jnp.arange(length)
            return grouped_attention(query, key, value, (order[:, None] >= order)[None])
        # The kernel does not support grouped-query attention, so keys and values are repeated for the queries that
        # share them.
        query, key, value = (
            jnp.repeat(jnp.moveaxis(array, 1, 2), heads // array.shape[2], axis=1) for array in (query, key, value)
        )
        attended = flash_attention(query, key, value, causal=True, sm_scale=query.shape[-1] ** -0.5)
        return jnp.moveaxis(attended, 1, 2)
