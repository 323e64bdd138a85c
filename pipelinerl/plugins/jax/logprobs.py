"""Log-probs of tokens from hidden states, in JAX: softmax in fp32, with the needed logits computed piece by piece.

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

#: Number of logits computed at once, on a CPU (64 MiB in fp32) and on a GPU or TPU (512 MiB). Pieces are larger on a
#: GPU or TPU because each one reads the head again. A smaller input is one piece and needs no recomputation.
LOGITS_AT_ONCE: Final = 2**24
LOGITS_ON_ACCELERATOR: Final = 2**27


def token_predictions(
    hidden: Array,
    head: Array,
    token_ids: Array,
    temperatures: Array,
    needed: Array,
    *,
    measures: tuple[HeadMeasure, ...] = (),
    logits_at_once: int = LOGITS_AT_ONCE,
    row_shards: int = 1,
) -> Array:
    """Return f32 [1 + M, R, C]: log-probs of the tokens that the hidden states predict, then M measures.

    If the logits of all tokens are more than `logits_at_once`, only those of needed tokens are computed, piece by
    piece, and backward recomputes them. The size of a piece depends on shapes alone, so XLA compiles one program,
    however many tokens are needed.

    Args:
        hidden: [R, C, D].
        head: [V, D], the output embedding.
        token_ids: i32 [R, C]; the token at [r, c] is predicted by hidden[r, c].
        temperatures: f32 [R, C]; they get no gradient.
        needed: bool [R, C]; the results of other tokens are undefined and must be ignored.
        measures: the M measures of each token's distribution to compute, such as its entropy.
        row_shards: the number of devices over which rows are divided; each computes pieces of its own tokens.
    """
    rows, columns, width = hidden.shape
    shard = rows // row_shards * columns
    pieces = 1
    while shard % (2 * pieces) == 0 and rows * columns // pieces * head.shape[0] > logits_at_once:
        pieces *= 2
    if pieces == 1:
        return _piece(measures, head, hidden, token_ids, temperatures)
    divided = (array.reshape(row_shards, shard) for array in (token_ids, temperatures, needed))
    results = _in_pieces(measures, pieces, head, hidden.reshape(row_shards, shard, width), *divided)
    return results.reshape(-1, rows, columns)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _in_pieces(
    measures: tuple[HeadMeasure, ...],
    pieces: int,
    head: Array,
    hidden: Array,
    token_ids: Array,
    temperatures: Array,
    needed: Array,
) -> Array:
    """Return log-probs and M measures, f32 [1 + M, S, T], of S shards, each with T tokens in `pieces` pieces.

    Pieces without needed tokens are skipped; their results are 0.

    The derivative is written out, because JAX cannot differentiate a loop whose length depends on data.
    """
    count, places = _needed_first(needed, pieces)

    def of_shard(hidden: Array, token_ids: Array, temperatures: Array, places: Array) -> Array:
        def compute(i: Array, results: Array) -> Array:
            at = places[i]
            piece = _piece(measures, head, hidden[at], token_ids[at], temperatures[at])
            return results.at[:, at].set(piece, unique_indices=True)

        return lax.fori_loop(0, count, compute, jnp.zeros((1 + len(measures), len(hidden))))

    return jax.vmap(of_shard, out_axes=1)(hidden, token_ids, temperatures, places)


def _needed_first(needed: Array, pieces: int) -> tuple[Array, Array]:
    """Return how many pieces have needed tokens, and token indices i32 [S, pieces, T / pieces], needed ones first."""
    shards, tokens = needed.shape
    order = jnp.argsort(~needed, axis=1, stable=True).reshape(shards, pieces, -1)
    return -(-needed.sum(axis=1).max() // (tokens // pieces)), order


def _pieces_forward(measures: tuple[HeadMeasure, ...], pieces: int, *inputs: Array) -> tuple[Array, tuple[Array, ...]]:
    return _in_pieces(measures, pieces, *inputs), inputs


def _pieces_backward(
    measures: tuple[HeadMeasure, ...], pieces: int, inputs: tuple[Array, ...], outward: Array
) -> tuple[Array | None, ...]:
    head, hidden, token_ids, temperatures, needed = inputs
    count, places = _needed_first(needed, pieces)

    def of_shard(
        hidden: Array, token_ids: Array, temperatures: Array, places: Array, outward: Array
    ) -> tuple[Array, Array]:
        def add(i: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            at = places[i]
            _, pull = jax.vjp(
                lambda head, part: _piece(measures, head, part, token_ids[at], temperatures[at]), head, hidden[at]
            )
            of_head, of_part = pull(outward[:, at])
            return so_far[0] + of_head, so_far[1].at[at].set(of_part, unique_indices=True)

        # A bf16 sum over many pieces would lose most of the small terms.
        return lax.fori_loop(0, count, add, (jnp.zeros(head.shape, jnp.float32), jnp.zeros_like(hidden)))

    # Each shard sums its own gradient of the head, so the devices add their gradients only once, after all pieces.
    of_head, of_hidden = jax.vmap(of_shard, in_axes=(0, 0, 0, 0, 1))(hidden, token_ids, temperatures, places, outward)
    return of_head.sum(axis=0).astype(head.dtype), of_hidden, None, None, None


_in_pieces.defvjp(_pieces_forward, _pieces_backward)


def _piece(
    measures: tuple[HeadMeasure, ...], head: Array, hidden: Array, token_ids: Array, temperatures: Array
) -> Array:
    logits = jnp.einsum(
        # By default, a TPU would multiply fp32 arrays in bf16.
        "...d,vd->...v",
        hidden,
        head,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
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
