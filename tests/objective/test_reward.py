"""Reward shaping (penalties, normalisation, clipping) gives hand-computed numbers."""

import numpy as np
import pytest

from pipelinerl.objective.reward import NormalizationScope, RewardShaping

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 1.0])
GROUPS = np.array([7, 7, 7, 7, 3, 3])
LENGTHS = np.array([3, 10, 12, 14, 15, 90])
ALL = np.ones(6, dtype=bool)


def shaped(rewards=REWARDS, valid=ALL, **fields):
    return RewardShaping(**fields).apply(rewards=rewards, groups=GROUPS, lengths=LENGTHS, valid=valid)


def test_default_reward_shaping_leaves_rewards_unchanged():
    np.testing.assert_array_equal(shaped(), REWARDS)


def test_reward_of_an_overlong_answer_is_reduced_by_at_most_1():
    """DAPO Eq. 13 with L_max = 14 and L_cache = 4: no penalty up to 10 tokens, and −1 from 14 tokens on."""
    np.testing.assert_allclose(
        shaped(overlong_tokens=14, overlong_margin=4) - REWARDS, [0.0, 0.0, -0.5, -1.0, -1.0, -1.0]
    )
    np.testing.assert_allclose(shaped(overlong_tokens=14) - REWARDS, [0.0, 0.0, 0.0, 0.0, -1.0, -1.0])


def test_rewards_can_be_normalised_over_groups_or_over_the_batch():
    np.testing.assert_allclose(shaped(mean=NormalizationScope.GROUP), [0.5, -0.5, -0.5, 0.5, 2.0, -2.0])
    np.testing.assert_allclose(
        shaped(mean=NormalizationScope.GROUP, std=NormalizationScope.GROUP, epsilon=0.0), [1, -1, -1, 1, 1, -1]
    )
    np.testing.assert_allclose(
        shaped(mean=NormalizationScope.BATCH, std=NormalizationScope.BATCH, epsilon=0.0),
        (REWARDS - REWARDS.mean()) / REWARDS.std(),
    )
    np.testing.assert_allclose(shaped(std=NormalizationScope.BATCH, epsilon=0.0), REWARDS / REWARDS.std())


def test_rewards_are_clipped_before_scaling():
    np.testing.assert_allclose(shaped(low=0.5, high=2.0, scale=10.0), [10, 5, 5, 10, 20, 10])


def test_rollouts_that_could_not_be_judged_are_excluded_from_reward_shaping():
    valid = np.array([True, True, False, True, True, True])
    poisoned = np.where(valid, REWARDS, np.nan)
    for over in (NormalizationScope.GROUP, NormalizationScope.BATCH):
        got = shaped(poisoned, valid, mean=over, std=over)
        rule = RewardShaping(mean=over, std=over)
        alone = rule.apply(rewards=REWARDS[valid], groups=GROUPS[valid], lengths=LENGTHS[valid], valid=ALL[valid])
        assert got[2] == 0.0
        np.testing.assert_allclose(got[valid], alone)
    nobody = shaped(valid=~ALL, mean=NormalizationScope.BATCH, std=NormalizationScope.GROUP)
    assert (nobody == 0).all()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"low": 1.0, "high": 0.0}, "low must not exceed high, got 1 and 0"),
        ({"overlong_margin": 3, "overlong_tokens": 2}, "overlong_margin (3) must not exceed overlong_tokens (2)"),
        ({"scale": 0.0}, "scale must be positive and finite, got 0"),
        ({"epsilon": -1.0}, "epsilon must not be negative, got -1"),
    ],
)
def test_contradictory_reward_shaping_settings_are_reported(fields, sentence):
    (reported,) = RewardShaping(**fields).contradictions()
    assert reported.startswith(sentence)
    assert list(RewardShaping().contradictions()) == []
