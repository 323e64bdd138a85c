"""The learning rate schedule has precomputed values at chosen steps."""

import pytest

from pipelinerl.training.schedule import LearningRateSchedule


@pytest.mark.parametrize(
    ("shape", "step", "factor"),
    [
        ("constant", 0, 0.25),
        ("constant", 3, 1.0),
        ("constant", 99, 1.0),
        ("linear", 4, 1.0),
        ("linear", 9, 0.55),
        ("linear", 14, 0.1),
        ("cosine", 9, 0.55),
        ("cosine", 14, 0.1),
        ("cosine", 99, 0.1),
    ],
)
def test_learning_rate_factor_matches_precomputed_values(shape, step, factor):
    schedule = LearningRateSchedule(warmup_steps=4, steps=14, shape=shape, final_fraction=0.1)
    if shape == "constant":
        schedule = LearningRateSchedule(warmup_steps=4, steps=14, shape="constant", final_fraction=0.0)
    assert schedule.factor(step) == pytest.approx(factor)
