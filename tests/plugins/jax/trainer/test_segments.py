"""Packed rows have few shapes; each token has its own position, and each segment lies within one row."""

import numpy as np
from hypothesis import given, settings, strategies as st

from pipelinerl.plugins.jax.trainer.attention import Rows
from pipelinerl.rng import generator


def positions_of(lengths):
    return np.concatenate([np.arange(length) for length in lengths]).astype(np.int32)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 150), min_size=1, max_size=40), st.sampled_from([1, 2, 4]))
def test_every_packed_segment_lies_within_one_row(lengths, multiple):
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


def test_batches_of_many_lengths_are_packed_into_rows_of_few_distinct_shapes():
    draw = generator(0, "shapes")
    batches = [draw.integers(1, 60, draw.integers(20, 120)) for _ in range(300)]
    shapes = {Rows.of(positions_of(lengths)).shape for lengths in batches}
    assert len({int(lengths.sum()) for lengths in batches}) > 200 and len(shapes) <= 10
    assert {rows for rows, _ in shapes} <= {6, 8, 12, 16, 24, 32, 48, 64, 96, 128}
