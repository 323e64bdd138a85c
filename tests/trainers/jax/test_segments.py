"""Rows of a few shapes: each token in its place, segments whole; attention against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipelinerl.rng import generator
from pipelinerl.trainers.jax import segments as jax_segments
from pipelinerl.trainers.jax.segments import PADDING, Rows, attention_within


def positions_of(lengths):
    return np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)


def ids_of(lengths):
    return np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
def test_every_segment_lies_whole_in_one_row(lengths, multiple):
    rows = Rows.of(positions_of(lengths), multiple=multiple)
    count, columns = rows.shape
    assert count % multiple == 0 and columns >= max(max(lengths), 64) and columns & (columns - 1) == 0
    assert len(np.unique(rows.place)) == sum(lengths)
    for segment in np.split(rows.place, np.cumsum(lengths)[:-1]):
        assert np.array_equal(segment, segment[0] + np.arange(len(segment)))
        assert segment[0] // columns == segment[-1] // columns
    tokens = np.arange(sum(lengths), dtype=np.int32)
    spread = rows.spread(tokens, fill=-7)
    assert spread.shape == rows.shape and np.array_equal(rows.collect(spread), tokens)
    assert (spread == -7).sum() == count * columns - len(tokens)


def test_lengths_are_many_and_shapes_are_few():
    draw = generator(0, "shapes")
    batches = [draw.integers(1, 60, draw.integers(20, 120)) for _ in range(300)]
    shapes = {Rows.of(positions_of(lengths)).shape for lengths in batches}
    assert len({int(lengths.sum()) for lengths in batches}) > 200 and len(shapes) <= 10
    assert {rows for rows, _ in shapes} <= {6, 8, 12, 16, 24, 32, 48, 64, 96, 128}


def plain_attention(query, key, value, ids):
    """A loop over tokens and heads, in float64."""
    tokens, heads, width = query.shape
    out = np.zeros_like(query)
    for t in range(tokens):
        seen = [s for s in range(t + 1) if ids[s] == ids[t]]
        for head in range(heads):
            of_key = head // (heads // key.shape[1])
            scores = key[seen, of_key] @ query[t, head] / np.sqrt(width)
            shares = np.exp(scores - scores.max())
            out[t, head] = shares / shares.sum() @ value[seen, of_key]
    return out


@pytest.mark.parametrize("at_once", [1024, 16])
def test_attention_stays_inside_segments(at_once, monkeypatch):
    monkeypatch.setattr(jax_segments, "_QUERIES_AT_ONCE", at_once)
    lengths, draw = (9, 40, 3, 25), generator(0, "attention")
    rows = Rows.of(positions_of(lengths))
    query, key, value = (draw.normal(size=(*rows.shape, heads, 8)) for heads in (4, 2, 2))
    ids = rows.spread(ids_of(lengths), fill=PADDING)
    arrays = (jnp.asarray(array, jnp.float32) for array in (query, key, value))
    attended, _ = jax.jit(attention_within(jnp.asarray(ids)))(*arrays, None)
    for row in range(rows.shape[0]):
        expected = plain_attention(query[row], key[row], value[row], ids[row])
        np.testing.assert_allclose(np.asarray(attended[row]), expected, atol=1e-5)
