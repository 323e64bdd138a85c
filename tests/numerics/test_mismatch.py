"""Mismatch of log-probs, against manual values."""

import numpy as np
import pytest

from pipelinerl.numerics.mismatch import mismatch
from pipelinerl.rng import generator


def test_statistics_match_manual_values():
    ours = np.log(np.array([0.5, 0.5, 0.25, 1.0], dtype=np.float32))
    theirs = np.log(np.array([0.5, 0.25, 0.5, 1.0], dtype=np.float32))
    got = mismatch(ours, theirs)
    assert got.num_tokens == 4
    np.testing.assert_allclose([got.mean, got.p50, got.p95, got.max], np.log(2) * np.array([0.5, 0.5, 1, 1]), rtol=1e-6)
    np.testing.assert_allclose(got.max_probability, 0.25, rtol=1e-6)
    np.testing.assert_allclose(got.k1, 0.0, atol=1e-7)
    np.testing.assert_allclose(got.k3, (2 - 1 - np.log(2) + 0.5 - 1 + np.log(2)) / 4, rtol=1e-6)
    np.testing.assert_allclose(got.ess, (1 + 2 + 0.5 + 1) ** 2 / 4 / (1 + 4 + 0.25 + 1), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 19, 100, 1001])
def test_quantiles_equal_numpy_quantiles(size):
    ours, theirs = generator(size, "quantiles").normal(size=(2, size))
    got = mismatch(ours, theirs)
    np.testing.assert_allclose([got.p50, got.p95], np.quantile(np.abs(ours - theirs), [0.5, 0.95]), rtol=1e-12)


def test_empty_input_agrees_perfectly_and_different_shapes_are_rejected():
    nothing = mismatch(np.zeros(0), np.zeros(0))
    assert (nothing.num_tokens, nothing.max, nothing.k3, nothing.ess) == (0, 0.0, 0.0, 1.0)
    with pytest.raises(ValueError, match="expected log-probs of the same tokens"):
        mismatch(np.zeros(2), np.zeros(3))
