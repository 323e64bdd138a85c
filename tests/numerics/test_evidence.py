"""The sequential test of an engine suspects no healthy engine, and needs few tokens to catch a faulty one."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from pipelinerl.numerics.evidence import TILTS, EngineEvidence, EProcess, deviations, distinct

Floats = NDArray[np.float64]
Noise = Callable[[np.random.Generator, int], Floats]

#: Noise of several shapes: light and heavy tails, and multiples of float32's spacing.
NOISES: dict[str, Noise] = {
    "normal": lambda draw, n: 1e-4 * draw.normal(size=n),
    "lognormal": lambda draw, n: 1e-3 * np.exp(1.5 * draw.normal(size=n)),
    "pareto": lambda draw, n: 1e-3 * draw.pareto(1.2, n),
    "spacings": lambda draw, n: 6e-8 * draw.integers(-3, 4, n),
}


def tokens(draw, count, noise, scale=1.0):
    """Return log-probs of an engine, whose noise is multiplied by `scale`, and of the trainer."""
    ours = -draw.exponential(1.0, count)
    return ours + noise(draw, count) * scale * (1.1 - np.exp(ours)), ours


def tokens_until_alarm(evidence, draw, share, scale):
    for version in range(50):
        wrong = np.where(draw.random(20) < share, scale, 1.0)
        if (first := evidence.add(*tokens(draw, 20, NOISES["normal"], wrong))) is not None:
            return 20 * version + first + 1
    raise AssertionError("never caught")


def healthy(seed, noise, *, versions):
    draw, evidence = np.random.default_rng(seed), EngineEvidence()
    theirs, ours = tokens(draw, 22, noise)
    evidence.anchor(theirs, ours)
    for _ in range(versions):
        assert evidence.add(*tokens(draw, 20, noise)) is None
    return evidence


@pytest.mark.parametrize("noise", NOISES)
def test_healthy_engine_is_never_suspected(noise):
    for seed in range(20):
        healthy(seed, NOISES[noise], versions=60)


def test_engine_that_was_exact_when_it_joined_may_round_later():
    """Rows that are computed together with others are rounded otherwise."""
    draw, evidence = np.random.default_rng(0), EngineEvidence()
    evidence.anchor(*tokens(draw, 256, lambda _, n: np.zeros(n)))
    for _ in range(50):
        assert evidence.add(*tokens(draw, 20, NOISES["spacings"], 8.0)) is None
    assert evidence.add(*tokens(draw, 20, NOISES["normal"], 10.0)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("noise", NOISES)
def test_no_healthy_engine_of_2500_is_suspected_in_40_versions(noise):
    for seed in range(2500):
        healthy(seed, NOISES[noise], versions=40)


@pytest.mark.parametrize(
    ("share", "scale", "most"), [(1.0, 1000.0, 8), (1.0, 100.0, 10), (1.0, 10.0, 40), (0.25, 1000.0, 80)]
)
def test_deviations_beyond_the_baseline_are_caught_after_few_tokens(share, scale, most):
    needed = [
        tokens_until_alarm(healthy(seed, NOISES["normal"], versions=40), np.random.default_rng(seed), share, scale)
        for seed in range(9)
    ]
    assert np.median(needed) <= most, needed


def test_slow_growth_of_noise_is_followed_and_a_fast_one_is_not():
    for growth, is_caught in ((1.005, False), (1.05, True)):
        draw, evidence = np.random.default_rng(0), healthy(0, NOISES["normal"], versions=30)
        alarms = []
        for version in range(300):
            given = tokens(draw, 20, NOISES["normal"], growth**version)
            alarms.append(evidence.add(*given) is not None)
        assert any(alarms) == is_caught, growth


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_log_prob_that_is_not_finite_alarms_at_its_place(wrong):
    evidence = healthy(0, NOISES["normal"], versions=5)
    theirs, ours = tokens(np.random.default_rng(1), 20, NOISES["normal"])
    theirs[7] = wrong
    assert evidence.add(theirs, ours) == 7


def test_tokens_of_one_context_count_once():
    ours = np.array([-1.0, -0.5, -1.0, -1.00001, -2.0])
    assert distinct(ours).tolist() == [0, 1, 4]
    assert deviations(ours, ours).tolist() == [0.0] * 5


def test_more_tokens_of_a_version_are_tested_without_those_that_were_tested_already():
    for repeats in (True, False):
        draw, evidence = np.random.default_rng(2), healthy(0, NOISES["normal"], versions=20)
        first = tokens(draw, 2, NOISES["normal"], 30.0)
        assert evidence.add(*first) is None and evidence.is_suspicious, "two unlikely tokens are no proof"
        found = [evidence.add(*(first if repeats else tokens(draw, 6, NOISES["normal"], 30.0)), more=True)]
        found.append(evidence.add(*first, more=True))
        assert (found == [None, None]) == repeats


def test_evidence_grows_over_versions_and_is_discounted_for_late_starts():
    early, late = EProcess(1), EProcess(1)
    early.begin()
    for _ in range(100):
        late.add(np.full((1, 1), -5.0))  # a healthy version loses the bets
        late.begin()
    for evidence, needed in ((early, 10), (late, 17)):
        bets = np.full((1, 1), math.log(3.0))
        assert next(n for n in range(1, 99) if evidence.add(bets) is not None) == needed


def test_samples_of_another_temperature_are_caught_and_right_ones_are_not():
    draw, logits = np.random.default_rng(0), np.random.default_rng(1).normal(size=(1500, 20)) * 2

    def at(factor):
        scaled = logits / factor
        return scaled - np.logaddexp.reduce(scaled, axis=1, keepdims=True)

    for factor, is_caught in ((1.0, False), (0.8, True), (1.25, True)):
        sampled = np.array([draw.choice(20, p=row) for row in np.exp(at(factor))])
        rows, evidence = np.arange(1500), EngineEvidence()
        tilted = np.stack([at(tilt)[rows, sampled] for tilt in TILTS])
        assert (evidence.add_samples(tilted, at(1.0)[rows, sampled]) is not None) == is_caught
