"""Log-probs computed in JAX, in one piece or many, equal the definition in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipelinerl.numerics.logprobs import log_softmax, measured, token_logprobs as definition
from pipelinerl.plugins.jax.logprobs import token_predictions
from pipelinerl.rng import generator
from trainer_contract.types import HeadMeasure

MEASURES = tuple(HeadMeasure)
R, C, D, V = 3, 16, 8, 21
EVERY = np.ones((R, C), bool)


def columns():
    draw = generator(0, "jax_logprobs")
    hidden, head = draw.normal(size=(R, C, D)).astype(np.float32), 3 * draw.normal(size=(V, D)).astype(np.float32)
    return hidden, head, draw.integers(0, V, (R, C)), draw.uniform(0.5, 2.0, (R, C)).astype(np.float32)


def test_jax_logprobs_agree_with_the_definition():
    hidden, head, tokens, temperatures = columns()
    expected = definition((hidden @ head.T).reshape(-1, V), tokens.ravel(), temperatures.ravel())
    (got,) = token_predictions(hidden, head, tokens, temperatures, EVERY)
    np.testing.assert_allclose(got.ravel(), expected, atol=1e-5)
    got, *measures = token_predictions(hidden, head, tokens, temperatures, EVERY, measures=MEASURES)
    np.testing.assert_allclose(got.ravel(), expected, atol=1e-5)
    distributions = log_softmax((hidden @ head.T).reshape(-1, V), temperatures.ravel())
    for measure, row in zip(MEASURES, measures, strict=True):
        np.testing.assert_allclose(row.ravel(), measured(measure, distributions), rtol=1e-5, atol=1e-5)


def test_jax_logprobs_and_gradients_do_not_depend_on_the_number_of_pieces_of_the_computation():
    hidden, head, tokens, temperatures = columns()
    cotangent = jnp.asarray(generator(1, "jax_logprobs").normal(size=(3, R, C)).astype(np.float32))

    def loss(hidden, head, at_once):
        got = token_predictions(hidden, head, tokens, temperatures, EVERY, measures=MEASURES, logits_at_once=at_once)
        return (got * cotangent).sum()

    whole, pieces = (jax.value_and_grad(loss, argnums=(0, 1))(hidden, head, at_once) for at_once in (10**9, 4 * R * V))
    for ours, theirs in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("row_shards", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_tokens_without_needed_logprobs_change_neither_results_nor_gradients_of_other_tokens(share, row_shards):
    hidden, head, tokens, temperatures = columns()
    needed = generator(2, "jax_logprobs").uniform(size=(R, C)) < share

    def loss(hidden, head, at_once):
        got = token_predictions(
            hidden, head, tokens, temperatures, needed, measures=MEASURES, logits_at_once=at_once, row_shards=row_shards
        )
        return jnp.where(needed, jnp.sin(got), 0.0).sum()

    evaluate = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)), static_argnums=2)
    whole, pieces = (evaluate(hidden, head, at_once) for at_once in (10**9, 4 * R * V))
    for ours, theirs in zip(jax.tree.leaves(pieces), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_only_pieces_that_contain_tokens_with_needed_logprobs_are_computed():
    hidden, head, tokens, temperatures = columns()
    needed = EVERY & (np.arange(C) % 8 == 5)
    (got,) = token_predictions(hidden, head, tokens, temperatures, needed, logits_at_once=4 * R * V, row_shards=R)
    assert np.count_nonzero(needed) == 2 * R and np.count_nonzero(got[needed]) == 2 * R
    assert np.count_nonzero(got) == 4 * R, "one of four pieces in each of three shards"


def test_bf16_gradient_of_the_output_layer_keeps_its_precision_if_computed_in_small_pieces():
    length = 512
    hidden = jnp.full((1, length, D), 0.5, jnp.bfloat16)
    head, tokens = jnp.zeros((V, D), jnp.bfloat16), np.zeros((1, length), int)
    temperatures, needed = np.ones((1, length), np.float32), np.ones((1, length), bool)

    def loss(head, at_once):
        return token_predictions(hidden, head, tokens, temperatures, needed, logits_at_once=at_once).sum()

    whole, pieces = (jax.grad(loss)(head, at_once) for at_once in (10**9, V))
    np.testing.assert_allclose(np.float32(pieces), np.float32(whole), rtol=2**-7)
