"""Mismatch of log-probs, by hand."""

import numpy as np
import pytest

from pipelinerl.numerics.mismatch import Mismatch, mismatch


def test_by_hand():
    ours = np.log(np.array([0.5, 0.5, 0.25, 1.0], dtype=np.float32))
    theirs = np.log(np.array([0.5, 0.25, 0.5, 1.0], dtype=np.float32))
    got = mismatch(ours, theirs)
    assert got.num_tokens == 4
    np.testing.assert_allclose([got.mean, got.p50, got.p95, got.max], np.log(2) * np.array([0.5, 0.5, 1, 1]), rtol=1e-6)
    np.testing.assert_allclose(got.max_probability, 0.25, rtol=1e-6)


def test_nothing_to_compare_and_nothing_comparable():
    assert mismatch(np.zeros(0), np.zeros(0)) == Mismatch(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    with pytest.raises(ValueError, match="expected log-probs of the same tokens"):
        mismatch(np.zeros(2), np.zeros(3))
