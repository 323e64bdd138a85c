"""Log-probs of tokens from hidden states, in JAX: softmax in fp32, with the logits computed piece by piece.

The results agree with the definitions in `logprobs`. The vocabulary may be sharded over devices. A token's logit is
therefore selected by comparing token ids: an index could point into another device's shard.
"""

from __future__ import annotations

from functools import partial
from typing import Final

import jax
import jax.numpy as jnp
from jax import Array, lax

from trainer_contract.types import HeadMeasure

#: Number of logits computed at once, first on a CPU (64 MiB in fp32), then on a GPU or TPU (512 MiB). There, pieces are
#: larger because each one reads the head again. A smaller input is one piece and needs no recomputation.
LOGITS_AT_ONCE: Final = 2**24
LOGITS_ON_ACCELERATOR: Final = 2**27


def token_predictions(
    hidden: Array,
    head: Array,
    token_ids: Array,
    temperatures: Array,
    *,
    measures: tuple[HeadMeasure, ...] = (),
    logits_at_once: int = LOGITS_AT_ONCE,
) -> Array:
    """Return f32 [1 + M, R, C]: log-probs of the tokens that the hidden states predict, then M measures.

    With more than `logits_at_once` logits, columns are processed in pieces, and backward recomputes the logits.

    Args:
        hidden: [R, C, D].
        head: [V, D], the output embedding.
        token_ids: i32 [R, C]; the token at [r, c] is predicted by hidden[r, c].
        temperatures: f32 [R, C].
        measures: the M measures of each token's distribution to compute, such as its entropy.
    """
    rows, columns, _ = hidden.shape
    pieces = 1
    while columns % (2 * pieces) == 0 and rows * (columns // pieces) * head.shape[0] > logits_at_once:
        pieces *= 2
    compute = partial(_piece, measures)
    if pieces == 1:
        return compute(head, hidden, token_ids, temperatures)

    def split(array: Array) -> Array:
        return jnp.moveaxis(array.reshape(rows, pieces, columns // pieces, *array.shape[2:]), 1, 0)

    piece = jax.checkpoint(compute, policy=jax.checkpoint_policies.nothing_saveable)
    done = lax.map(lambda part: piece(head, *part), (split(hidden), split(token_ids), split(temperatures)))
    return jnp.moveaxis(done, 0, 2).reshape(1 + len(measures), rows, columns)


def _piece(
    measures: tuple[HeadMeasure, ...], head: Array, hidden: Array, token_ids: Array, temperatures: Array
) -> Array:
    logits = jnp.einsum("rcd,vd->rcv", hidden, head, preferred_element_type=jnp.float32)
    logits = logits / temperatures[..., None]
    chosen = token_ids[..., None] == jnp.arange(head.shape[0])
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    logprobs = jnp.where(chosen, logits, 0.0).sum(axis=-1) - normaliser
    return jnp.stack([logprobs, *(_measured(measure, logits, normaliser) for measure in measures)])


def _measured(measure: HeadMeasure, logits: Array, normaliser: Array) -> Array:
    if measure is HeadMeasure.MEAN_LOGPROB:
        return logits.mean(axis=-1) - normaliser
    logprobs = logits - normaliser[..., None]  # more precise than normaliser − Σ π·logits, which suffers cancellation
    return -(jnp.exp(logprobs) * logprobs).sum(axis=-1)
