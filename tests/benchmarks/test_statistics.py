"""The statistics that the benchmarks compute, compared with known values."""

import numpy as np
import pytest

from benchmarks.measure import Interval, bootstrap_median
from benchmarks.trl import Arm, Crossing, arm_of, compared


def test_bootstrap_interval_covers_the_median_95_percent_of_the_time():
    """Compute intervals for 400 samples of 25 standard normal numbers; about 95 % contain the true median, 0."""
    draw = np.random.Generator(np.random.PCG64(7))
    intervals = [bootstrap_median(draw.normal(size=25).tolist(), draws=500) for _ in range(400)]
    covered = np.mean([interval.low <= 0.0 <= interval.high for interval in intervals])
    assert 0.90 <= covered <= 0.99


def event(kind, elapsed_s, **fields):
    return {"time": 0.0, "kind": kind, "elapsed_s": elapsed_s, **fields}


EVENTS = [
    event("run_started", 0.1),
    event("evaluation", 12.0, model_version=0, accuracy=0.91),
    event("step", 14.0, step=1),
    event("step", 16.5, step=2),
    event("step", 30.0, step=3),
    event("step", 32.5, step=4),
    event("evaluation", 40.0, model_version=50, accuracy=0.80),
    event("evaluation", 72.0, model_version=100, accuracy=0.92),
    event("evaluation", 99.0, model_version=150, accuracy=0.90),
]


def test_benchmark_time_is_counted_from_the_end_of_the_first_evaluation():
    assert arm_of(EVENTS, 0.0).curve == [(0, 0.0, 0.91), (50, 28.0, 0.80), (100, 60.0, 0.92), (150, 87.0, 0.90)]
    with pytest.raises(ValueError, match="got 1 in all"):
        arm_of(EVENTS[:3], 0.0)


def test_target_accuracy_reached_before_training_does_not_count():
    arm = arm_of(EVENTS, 0.0)
    assert arm.crossing(0.90) == Crossing(100, 60.0, True)
    assert arm.crossing(0.95) == Crossing(150, 87.0, False)


def test_comparison_reports_that_our_run_never_reached_the_target_accuracy():
    quick = Arm([(0, 0.0, 0.4), (10, 20.0, 0.95)], [], load=0.0)
    slow = Arm([(0, 0.0, 0.4), (10, 40.0, 0.95)], [], load=0.0)
    never = Arm([(0, 0.0, 0.4), (10, 20.0, 0.41)], [], load=0.0)
    assert compared([(quick, slow)], 0.95) == (Interval(0.5, 0.5, 0.5), True)
    assert compared([(never, slow)], 0.95) == (Interval(0.5, 0.5, 0.5), False)
    assert compared([(slow, never)], 0.95) == (Interval(2.0, 2.0, 2.0), True)
