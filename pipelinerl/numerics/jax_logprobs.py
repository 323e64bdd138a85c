"""Log-probs of tokens from hidden states, in JAX: fp32 softmax, without ever holding all logits of a big vocabulary.

Agrees with the definition in `logprobs`. Works on logits whose vocabulary is divided over devices: the token's logit is
picked by comparison, not by an index into another device's part.
"""

from __future__ import annotations

from typing import Final

import jax
import jax.numpy as jnp
from jax import Array, lax

#: Logits of one device held at once: 64 MiB in fp32. What fits is computed in one piece, without recomputation.
LOGITS_AT_ONCE: Final = 2**24


def token_logprobs(
    hidden: Array, head: Array, token_ids: Array, temperatures: Array, *, logits_at_once: int = LOGITS_AT_ONCE
) -> Array:
    """Log-probs f32 [R, C] of the tokens that the hidden states predict.

    Beyond `logits_at_once` logits the work is done in pieces of columns, whose logits the backward pass computes again.

    Args:
        hidden: [R, C, D].
        head: [V, D], the output embedding.
        token_ids: i32 [R, C]; the token at [r, c] is predicted by hidden[r, c].
        temperatures: f32 [R, C].
    """
    rows, columns, _ = hidden.shape
    pieces = 1
    while columns % (2 * pieces) == 0 and rows * (columns // pieces) * head.shape[0] > logits_at_once:
        pieces *= 2
    if pieces == 1:
        return _piece(head, hidden, token_ids, temperatures)

    def split(array: Array) -> Array:
        return jnp.moveaxis(array.reshape(rows, pieces, columns // pieces, *array.shape[2:]), 1, 0)

    piece = jax.checkpoint(_piece, policy=jax.checkpoint_policies.nothing_saveable)
    done = lax.map(lambda part: piece(head, *part), (split(hidden), split(token_ids), split(temperatures)))
    return jnp.moveaxis(done, 0, 1).reshape(rows, columns)


def _piece(head: Array, hidden: Array, token_ids: Array, temperatures: Array) -> Array:
    logits = jnp.einsum("rcd,vd->rcv", hidden, head, preferred_element_type=jnp.float32)
    logits = logits / temperatures[..., None]
    chosen = token_ids[..., None] == jnp.arange(head.shape[0])
    return jnp.where(chosen, logits, 0.0).sum(axis=-1) - jax.nn.logsumexp(logits, axis=-1)
