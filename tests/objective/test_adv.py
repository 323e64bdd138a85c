"""Advantages against numbers worked out by hand."""

import numpy as np
import pytest

from pipelinerl.objective.adv import Baseline, GroupRelative, Scale

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 1.0])
GROUPS = np.array([7, 7, 7, 7, 3, 3])
VALID = np.array([True, True, True, True, True, True])


def advantages(rewards=REWARDS, valid=VALID, **fields):
    return GroupRelative(**fields).advantages(rewards=rewards, groups=GROUPS, valid=valid)


def test_mean_and_std():
    got = advantages(epsilon=0.0)
    np.testing.assert_allclose(got, [1.0, -1.0, -1.0, 1.0, 1.0, -1.0])


def test_mean_alone():
    np.testing.assert_allclose(advantages(scale=Scale.NONE), [0.5, -0.5, -0.5, 0.5, 2.0, -2.0])


def test_leave_one_out():
    # 1 − mean(0, 0, 1) = 2/3, 0 − mean(1, 0, 1) = −2/3; 5 − 1 = 4.
    got = advantages(baseline=Baseline.LEAVE_ONE_OUT, scale=Scale.NONE)
    np.testing.assert_allclose(got, [2 / 3, -2 / 3, -2 / 3, 2 / 3, 4.0, -4.0])


def test_no_baseline():
    np.testing.assert_allclose(advantages(baseline=Baseline.NONE, scale=Scale.NONE), REWARDS)


@pytest.mark.parametrize("baseline", list(Baseline))
@pytest.mark.parametrize("scale", list(Scale))
def test_a_rollout_without_judgement_changes_nothing_for_the_others(baseline, scale):
    valid = np.array([True, True, False, True, True, True])
    poisoned = REWARDS.copy()
    poisoned[2] = np.nan
    got = advantages(poisoned, valid, baseline=baseline, scale=scale)
    rule = GroupRelative(baseline=baseline, scale=scale)
    without = rule.advantages(rewards=REWARDS[valid], groups=GROUPS[valid], valid=VALID[valid])
    assert got[2] == 0.0
    np.testing.assert_allclose(got[valid], without)


def test_equal_rewards_and_single_rollouts_have_no_advantage():
    equal = advantages(np.full(6, 0.3))
    np.testing.assert_allclose(equal, 0.0, atol=1e-9)
    alone = np.array([True, False, False, False, False, False])
    assert (advantages(valid=alone) == 0.0).all()
    assert (advantages(valid=alone, baseline=Baseline.LEAVE_ONE_OUT) == 0.0).all()


def test_a_batch_without_rollouts():
    none = GroupRelative().advantages(rewards=np.zeros(0), groups=np.zeros(0, int), valid=np.zeros(0, bool))
    assert none.shape == (0,)
