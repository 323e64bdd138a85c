"""Advantages against numbers worked out by hand, and against slow twins."""

import numpy as np
import pytest

from pipelinerl.objective.adv import (
    GAE,
    KINDS,
    Baseline,
    GroupFiltered,
    GroupRelative,
    Metric,
    RewardToGo,
    Scale,
    Whitening,
)
from pipelinerl.rng import generator

REWARDS = np.array([1.0, 0.0, 0.0, 1.0, 5.0, 1.0])
GROUPS = np.array([7, 7, 7, 7, 3, 3])
VALID = np.array([True, True, True, True, True, True])
LENGTHS = np.array([3, 1, 2, 4, 1, 2])
RULES = [
    *(GroupRelative(baseline=baseline, scale=scale) for baseline in Baseline for scale in Scale),
    *(GroupFiltered(keep=2, metric=metric) for metric in Metric),
    *(RewardToGo(discount=0.9, kl=0.1, whitening=whitening) for whitening in Whitening),
    *(GAE(discount=0.9, kl=0.1, whitening=whitening) for whitening in Whitening),
]


def columns_of(rule, size):
    draw = generator(3, "advantages")
    return {name: draw.normal(size=size) for name in sorted(rule.needs)}


def per_rollout(tokens, lengths=LENGTHS):
    """The one advantage that all tokens of a rollout have."""
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    assert all((part == part[0]).all() for part in parts)
    return np.array([part[0] for part in parts])


def advantages(rewards=REWARDS, valid=VALID, **fields):
    rule = GroupRelative(**fields)
    return per_rollout(rule.advantages(rewards=rewards, groups=GROUPS, lengths=LENGTHS, valid=valid, columns={}))


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


def test_normalised_over_the_tokens_of_the_batch():
    """REINFORCE++ Eq. 11 and 12: token by token, so that a long rollout counts for more."""
    got = advantages(scale=Scale.BATCH, epsilon=0.0)
    tokens = np.repeat([0.5, -0.5, -0.5, 0.5, 2.0, -2.0], LENGTHS)
    np.testing.assert_allclose(np.repeat(got, LENGTHS), (tokens - tokens.mean()) / tokens.std())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rollout_without_judgement_changes_nothing_for_the_others(rule):
    valid = np.array([True, True, False, True, True, True])
    poisoned, judged = REWARDS.copy(), np.repeat(valid, LENGTHS)
    poisoned[2] = np.nan
    columns = columns_of(rule, LENGTHS.sum())
    got = rule.advantages(rewards=poisoned, groups=GROUPS, lengths=LENGTHS, valid=valid, columns=columns)
    without = rule.advantages(
        rewards=REWARDS[valid],
        groups=GROUPS[valid],
        lengths=LENGTHS[valid],
        valid=VALID[valid],
        columns={name: column[judged] for name, column in columns.items()},
    )
    assert (got[~judged] == 0.0).all()
    np.testing.assert_allclose(got[judged], without, atol=1e-12)


def test_equal_rewards_and_single_rollouts_have_no_advantage():
    equal = advantages(np.full(6, 0.3))
    np.testing.assert_allclose(equal, 0.0, atol=1e-9)
    alone = np.array([True, False, False, False, False, False])
    assert (advantages(valid=alone) == 0.0).all()
    assert (advantages(valid=alone, baseline=Baseline.LEAVE_ONE_OUT) == 0.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_without_rollouts_and_one_without_judgements(kind):
    rule, none = KINDS[kind](), np.zeros(0, int)
    empty = rule.advantages(
        rewards=np.zeros(0), groups=none, lengths=none, valid=np.zeros(0, bool), columns=columns_of(rule, 0)
    )
    assert empty.shape == (0,)
    unjudged = rule.advantages(
        rewards=REWARDS, groups=GROUPS, lengths=LENGTHS, valid=~VALID, columns=columns_of(rule, LENGTHS.sum())
    )
    assert unjudged.shape == (LENGTHS.sum(),) and (unjudged == 0).all()


@pytest.mark.parametrize(("metric", "kept"), [(Metric.SHORTEST, [1, 2, 4, 5]), (Metric.TOKEN_EFFICIENCY, [0, 3, 4, 5])])
def test_of_each_group_only_the_best_learn_and_from_one_another(metric, kept):
    rewards = np.array([1.0, 0.0, 0.5, 1.0, 5.0, 1.0]) if metric is Metric.SHORTEST else np.array([2.0, 0, 0, 1, 5, 1])
    rule = GroupFiltered(keep=2, metric=metric, epsilon=0.0)
    got = per_rollout(rule.advantages(rewards=rewards, groups=GROUPS, lengths=LENGTHS, valid=VALID, columns={}))
    first, second, *_ = kept
    expected = np.zeros(6)
    expected[[first, second]] = [1.0, -1.0] if rewards[first] > rewards[second] else [-1.0, 1.0]
    expected[[4, 5]] = [1.0, -1.0]
    np.testing.assert_allclose(got, expected)


def test_the_return_is_the_discounted_reward_less_the_kl_that_is_still_to_come():
    rule = RewardToGo(discount=0.5, kl=0.1)
    columns = {"old_logprobs": np.array([-1.0, -2.0, -3.0]), "ref_logprobs": np.array([-2.0, -2.0, -1.0])}
    got = rule.advantages(
        rewards=np.array([4.0, 1.0]),
        groups=np.array([0, 0]),
        lengths=np.array([2, 1]),
        valid=np.ones(2, bool),
        columns=columns,
    )
    # KL costs 0.1, 0, −0.2: the second token earns 4, the first half of that less 0.1; the other rollout 1 + 0.2.
    np.testing.assert_allclose(got, [1.9, 4.0, 1.2])
    assert rule.needs == {"old_logprobs", "ref_logprobs"} and RewardToGo().needs == frozenset()


@pytest.mark.parametrize("whitening", Whitening)
def test_gae_equals_its_definition_written_with_loops(whitening):
    rule = GAE(discount=0.9, trace=0.7, kl=0.2, whitening=whitening, epsilon=0.0)
    columns = columns_of(rule, LENGTHS.sum())
    arguments = {"rewards": REWARDS, "groups": GROUPS, "lengths": LENGTHS, "valid": VALID, "columns": columns}
    wanted, start = [], 0
    for reward, length in zip(REWARDS, LENGTHS, strict=True):
        mine = {name: column[start : start + length] for name, column in columns.items()}
        start += length
        values = [*mine["values"], 0.0]
        cost = 0.2 * (mine["old_logprobs"] - mine["ref_logprobs"])
        earned = [(reward if t == length - 1 else 0.0) - cost[t] for t in range(length)]
        surprise = [earned[t] + 0.9 * values[t + 1] - values[t] for t in range(length)]
        wanted += [sum((0.9 * 0.7) ** k * surprise[t + k] for k in range(length - t)) for t in range(length)]
    raw = np.array(wanted)
    np.testing.assert_allclose(rule.returns(**arguments), raw + columns["values"], rtol=1e-12)
    if whitening is Whitening.BATCH:
        raw = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(rule.advantages(**arguments), raw, rtol=1e-10, atol=1e-12)


def test_gae_without_trace_decay_is_the_return_less_the_value():
    rule = GAE(trace=1.0, whitening=Whitening.NONE)
    values = generator(1, "values").normal(size=LENGTHS.sum())
    arguments = {
        "rewards": REWARDS,
        "groups": GROUPS,
        "lengths": LENGTHS,
        "valid": VALID,
        "columns": {"values": values},
    }
    np.testing.assert_allclose(rule.advantages(**arguments), np.repeat(REWARDS, LENGTHS) - values, rtol=1e-12)
    np.testing.assert_allclose(rule.returns(**arguments), np.repeat(REWARDS, LENGTHS), atol=1e-12)


def test_rollouts_without_sampled_tokens_are_passed_over():
    lengths = np.array([2, 0, 1, 0])
    got = RewardToGo().advantages(
        rewards=np.array([1.0, 9.0, 3.0, 9.0]), groups=np.zeros(4, int), lengths=lengths, valid=lengths > 0, columns={}
    )
    np.testing.assert_allclose(got, [1.0, 1.0, 3.0])
