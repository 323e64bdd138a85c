"""The TIS benchmark compares the objectives of Yao et al. 2025."""

import numpy as np
import pytest

from benchmarks.tis import ARMS, RECIPE
from pipelinerl.config.recipe import load
from pipelinerl.enums import WeightFormat
from pipelinerl.objective.presets import resolve

EPSILON_LOW, EPSILON_HIGH = 0.2, 0.28
#: log π, log π_old, log μ and advantage of each token: on-policy and off-policy tokens, and tokens whose ratio exceeds
#: the clip range or the cap of the importance weight.
TOKENS = [
    (-1.0, -1.0, -1.0, 1.0),
    (-1.0, -1.0, -2.5, 1.0),
    (-1.0, -1.0, -2.5, -1.0),
    (-2.0, -2.0, -0.5, 1.0),
    (-2.0, -2.0, -0.5, -1.0),
    (-1.0, -1.6, -1.2, 1.0),
    (-1.6, -1.0, -1.2, -0.5),
]


def _columns():
    data = np.array(TOKENS)
    size = len(TOKENS)
    return {
        "loss_mask": np.ones(size, dtype=bool),
        "advantages": data[:, 3],
        "weights": np.ones(size),
        "behavior_logprobs": data[:, 2],
        "old_logprobs": data[:, 1],
        "segment_ids": np.zeros(size, dtype=np.int64),
        "num_segments": 1,
    }


def _expected(name):
    """Return d loss / d log π of each token as in Yao et al. 2025: −w · A · r, or 0 where PPO clips the ratio r."""
    gradients = []
    for current, old, behavior, advantage in TOKENS:
        correction = float(np.exp(old - behavior))
        weight = {"Vanilla-IS": correction, "TIS-2": min(correction, 2.0)}.get(name, 1.0)
        ratio = float(np.exp(current - (behavior if name == "PPO-IS" else old)))
        clipped = min(max(ratio, 1 - EPSILON_LOW), 1 + EPSILON_HIGH)
        moves = ratio * advantage <= clipped * advantage
        gradients.append(-weight * advantage * ratio if moves else 0.0)
    return gradients


def _config(arm):
    return load(RECIPE, ARMS[arm])


@pytest.mark.parametrize("arm", ARMS)
def test_each_run_of_the_tis_benchmark_has_the_gradient_of_the_published_objective(arm):
    objective = resolve(_config(arm).objective)
    gradient = objective.prediction_gradient(np.array(TOKENS)[:, 0], _columns())
    assert gradient.tolist() == pytest.approx(_expected(arm.split()[-1]))


def test_runs_of_the_tis_benchmark_differ_only_in_objective_and_weight_format():
    reference, native, *others = (_config(arm) for arm in ARMS)
    assert reference.model_dump() == load(RECIPE).model_dump()
    assert {other.engine.weights for other in others} == {WeightFormat.INT8}
    assert native.engine == reference.engine
    for other in (native, *others):
        engine = other.engine.model_copy(update={"weights": WeightFormat.NATIVE})
        same = other.model_copy(update={"engine": engine, "objective": reference.objective})
        assert same == reference
