"""Fixture that builds random micro-batches; each input of the objective is a numpy float64 array, called a column."""

import numpy as np
import pytest

from pipelinerl.rng import generator

FLOATS = (
    "advantages", "weights", "behavior_logprobs", "old_logprobs", "ref_logprobs", "vocab_mean_logprobs",
    "vocab_entropies",
)  # fmt: skip


@pytest.fixture
def columns_of():
    """Return a factory (seed, lengths) → (log-probs [T], columns); the policies differ enough to trigger every clip."""

    def make(seed, lengths=(6, 3, 9, 1, 5)):
        draw = generator(seed, "columns")
        total = sum(lengths)
        positions = np.concatenate([np.arange(length) for length in lengths])
        mask = (positions > 0) & (draw.random(total) < 0.8)
        logprobs = -draw.exponential(1.0, total)
        columns = {name: np.where(mask, logprobs + draw.normal(0, 0.5, total), 0.0) for name in FLOATS}
        columns["advantages"] = np.where(mask, draw.normal(size=total), 0.0)
        columns["weights"] = np.where(mask, draw.random(total), 0.0)
        columns |= {"loss_mask": mask, "segment_ids": np.repeat(np.arange(len(lengths)), lengths)}
        return logprobs, columns | {"num_segments": len(lengths)}

    return make
