"""Tests of the benchmark of runs that differ in staleness bounds (engine j, trainer k) and importance weights."""

import numpy as np
import pytest

from benchmarks.staleness import ARMS, RECIPE
from pipelinerl.config.recipe import load
from pipelinerl.objective.presets import resolve

LOGPROBS = np.array([-1.0, -1.0, -2.0])
BEHAVIOR = np.array([-1.0, -2.5, -0.5])
ADVANTAGES = np.array([1.0, 1.0, -1.0])


@pytest.mark.parametrize("arm", ARMS)
def test_each_staleness_benchmark_run_uses_reinforce_with_the_importance_weight_in_its_name(arm):
    config = load(RECIPE, ARMS[arm])
    assert arm.startswith(f"({config.staleness.j}, {config.staleness.k:g})")
    columns = {
        "loss_mask": np.ones(3, dtype=bool),
        "advantages": ADVANTAGES,
        "weights": np.ones(3),
        "behavior_logprobs": BEHAVIOR,
        "segment_ids": np.zeros(3, dtype=np.int64),
        "num_segments": 1,
    }
    weight = np.minimum(np.exp(LOGPROBS - BEHAVIOR), 2.0) if arm.endswith("TIS-2") else np.ones(3)
    gradient = resolve(config.objective).prediction_gradient(LOGPROBS, columns)
    assert gradient.tolist() == pytest.approx((-weight * ADVANTAGES).tolist())
