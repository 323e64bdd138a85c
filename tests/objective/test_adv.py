"""Advantages against hand-computed numbers and plain loops; `test_papers.py` compares those of the presets."""

import dataclasses

import numpy as np
import pytest

from pipelinerl.objective.adv import (
    GAE,
    KINDS,
    Baseline,
    Credit,
    Decoupled,
    GroupFiltered,
    GroupRelative,
    Metric,
    RewardToGo,
    RoleBaseline,
    Scale,
    Whitening,
)
from pipelinerl.objective.contradictions import contradictions
from pipelinerl.objective.presets import resolve
from pipelinerl.objective.reward import PartReward, Parts, Roles, Scored, TurnReward, Turns
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
    Decoupled(),
]


def computed(rule, columns=(), *, what="advantages", **rollouts):
    """Call the method named `what` of an advantage rule, by default on the rollouts of this module."""
    usual = {"rewards": REWARDS, "groups": GROUPS, "lengths": LENGTHS, "valid": VALID}
    return getattr(rule, what)(Scored(**usual | rollouts), dict(columns))


def columns_of(rule, size):
    draw = generator(3, "advantages")
    return {name: draw.normal(size=size) for name in sorted(rule.needs)}


def per_rollout(tokens, lengths=LENGTHS):
    """Check that all tokens of each rollout have the same advantage; return one advantage per rollout."""
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    assert all((part == part[0]).all() for part in parts)
    return np.array([part[0] for part in parts])


def advantages(rewards=REWARDS, valid=VALID, **fields):
    return per_rollout(computed(GroupRelative(**fields), rewards=rewards, valid=valid))


def test_mean_scale_divides_advantages_by_the_groups_mean_reward_and_gives_0_if_that_mean_is_0():
    rewards = np.array([1.0, 0.0, 0.0, 1.0, 0.0, 0.0])
    np.testing.assert_allclose(advantages(rewards, scale=Scale.MEAN), [1.0, -1.0, -1.0, 1.0, 0.0, 0.0])


def decoupled(parts, rewards=REWARDS):
    terms = None if parts is None else Parts.of([[PartReward(*part) for part in one] for one in parts], rewards)
    return per_rollout(computed(Decoupled(epsilon=1e-15), rewards=rewards, parts=terms))


def test_reward_without_parts_is_treated_as_a_single_part():
    whitened = np.array([1.0, -1, -1, 1, 1, -1])
    np.testing.assert_allclose(decoupled(None), whitened)
    np.testing.assert_allclose(decoupled([[] for _ in REWARDS]), whitened)


def test_rollout_without_a_reward_part_is_excluded_from_the_mean_of_that_part():
    parts = [[("a", 1.0, 1.0)], [("a", 0.0, 1.0)], [("b", 5.0, 1.0)], [("b", 1.0, 1.0)], [], []]
    got = decoupled(parts, np.array([1.0, 0, 5, 1, 1, 1]))
    raw = np.array([1.0, -1, 1, -1, 0, 0])
    np.testing.assert_allclose(got, raw / raw.std())


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_rollout_that_could_not_be_judged_does_not_affect_the_advantages_of_other_rollouts(rule):
    valid = np.array([True, True, False, True, True, True])
    poisoned, judged = REWARDS.copy(), np.repeat(valid, LENGTHS)
    poisoned[2] = np.nan
    columns = columns_of(rule, LENGTHS.sum())
    got = computed(rule, columns, rewards=poisoned, valid=valid)
    without = computed(
        rule,
        rewards=REWARDS[valid],
        groups=GROUPS[valid],
        lengths=LENGTHS[valid],
        valid=VALID[valid],
        columns={name: column[judged] for name, column in columns.items()},
    )
    assert (got[~judged] == 0.0).all()
    np.testing.assert_allclose(got[judged], without, atol=1e-12)


def test_advantages_are_zero_in_a_group_with_equal_rewards_or_with_a_single_rollout():
    equal = advantages(np.full(6, 0.3))
    np.testing.assert_allclose(equal, 0.0, atol=1e-9)
    alone = np.array([True, False, False, False, False, False])
    assert (advantages(valid=alone) == 0.0).all()
    assert (advantages(valid=alone, baseline=Baseline.LEAVE_ONE_OUT) == 0.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_advantage_rules_return_zeros_for_unjudged_rollouts_and_an_empty_array_for_an_empty_batch(kind):
    rule, none = KINDS[kind](), np.zeros(0, int)
    nothing = {"rewards": np.zeros(0), "groups": none, "lengths": none, "valid": np.zeros(0, bool)}
    assert computed(rule, columns_of(rule, 0), **nothing).shape == (0,)
    unjudged = computed(rule, columns_of(rule, LENGTHS.sum()), valid=~VALID)
    assert unjudged.shape == (LENGTHS.sum(),) and (unjudged == 0).all()


@pytest.mark.parametrize(("metric", "kept"), [(Metric.SHORTEST, [1, 2, 4, 5]), (Metric.TOKEN_EFFICIENCY, [0, 3, 4, 5])])
def test_group_filter_gives_advantages_only_to_the_best_rollouts_of_each_group_by_the_filters_metric(metric, kept):
    rewards = np.array([1.0, 0.0, 0.5, 1.0, 5.0, 1.0]) if metric is Metric.SHORTEST else np.array([2.0, 0, 0, 1, 5, 1])
    rule = GroupFiltered(keep=2, metric=metric, epsilon=0.0)
    got = per_rollout(computed(rule, rewards=rewards))
    first, second, *_ = kept
    expected = np.zeros(6)
    expected[[first, second]] = [1.0, -1.0] if rewards[first] > rewards[second] else [-1.0, 1.0]
    expected[[4, 5]] = [1.0, -1.0]
    np.testing.assert_allclose(got, expected)


def test_rollouts_without_sampled_tokens_get_no_advantages():
    lengths = np.array([2, 0, 1, 0])
    got = computed(
        RewardToGo(),
        rewards=np.array([1.0, 9.0, 3.0, 9.0]),
        groups=np.zeros(4, int),
        lengths=lengths,
        valid=lengths > 0,
    )
    np.testing.assert_allclose(got, [1.0, 1.0, 3.0])


# --- credit by turns -------------------------------------------------------------------------------------------------

#: Five rollouts in two groups; each is a list of turns, given as (number of tokens, reward).
EPISODES = [
    [(2, 0.5), (1, 0.0), (3, 0.25)],
    [(1, 0.0), (2, 1.0)],
    [(3, 0.0), (1, 0.25)],
    [(2, -1.0), (2, 0.0)],
    [(1, 0.5)],
]
EPISODE_GROUPS = np.array([0, 0, 0, 1, 1])
#: The rewards of the whole rollouts. The third rollout's reward exceeds the sum of its turns' rewards by 1.
TOTALS = np.array([0.75, 1.0, 1.25, -1.0, 0.5])


def by_turns(rewards=TOTALS, valid=None, episodes=EPISODES, groups=EPISODE_GROUPS, **fields):
    """Return one advantage for each turn of each rollout."""
    turns = Turns.of([[TurnReward(*turn) for turn in one] for one in episodes])
    lengths = np.array([sum(turn[0] for turn in one) for one in episodes])
    valid = np.ones(len(episodes), bool) if valid is None else valid
    rule = GroupRelative(credit=Credit.TURNS, **fields)
    tokens = computed(rule, rewards=rewards, groups=groups, lengths=lengths, valid=valid, turns=turns)
    return per_rollout(tokens, turns.lengths)


def definition(episodes, groups, valid, baseline, scale, epsilon=1e-6):
    """Compute each turn's advantage in loops."""
    advantages = []
    for i, one in enumerate(episodes):
        for k in range(len(one)):
            same = [j for j in range(len(episodes)) if groups[j] == groups[i] and valid[j] and k < len(episodes[j])]
            own, all_of_them = to_go(i, k), [to_go(j, k) for j in same]
            if not valid[i]:
                advantages.append(0.0)
                continue
            centre = np.mean(all_of_them)
            if baseline is Baseline.LEAVE_ONE_OUT:
                others = [to_go(j, k) for j in same if j != i]
                centre = np.mean(others) if others else own
            centre = 0.0 if baseline is Baseline.NONE else centre
            advantages.append((own - centre) / (np.std(all_of_them) + epsilon if scale is Scale.STD else 1.0))
    return np.array(advantages)


def to_go(i, k):
    """Return rollout i's reward from turn k on; reward that was assigned to no turn is credited to the last turn."""
    rest = TOTALS[i] - sum(reward for _, reward in EPISODES[i])
    return sum(reward for _, reward in EPISODES[i][k:]) + rest


@pytest.mark.parametrize("baseline", Baseline)
@pytest.mark.parametrize("scale", [Scale.NONE, Scale.STD])
@pytest.mark.parametrize("valid", [[True] * 5, [True, False, True, True, True]])
def test_turn_advantages_equal_a_plain_loop(baseline, scale, valid):
    valid = np.array(valid)
    rewards = np.where(valid, TOTALS, np.nan)
    got = by_turns(rewards, valid, baseline=baseline, scale=scale)
    expected = definition(EPISODES, EPISODE_GROUPS, valid, baseline, scale)
    np.testing.assert_allclose(got, expected, atol=1e-9)


@pytest.mark.parametrize("baseline", Baseline)
@pytest.mark.parametrize("scale", Scale)
def test_advantages_with_turn_credit_and_episode_credit_are_equal_if_every_rollout_has_one_turn(baseline, scale):
    single = [[(int(length), float(reward))] for length, reward in zip(LENGTHS, REWARDS, strict=True)]
    got = by_turns(REWARDS, VALID, single, GROUPS, baseline=baseline, scale=scale)
    np.testing.assert_allclose(got, advantages(baseline=baseline, scale=scale), atol=1e-12)


def test_advantages_with_turn_credit_compare_a_turn_only_with_turns_of_the_same_agent():
    episodes = [[(1, 0.0, "main"), (1, 5.0, "critic")], [(1, 0.0, "main"), (1, 1.0, "main")]]
    got = by_turns(np.array([5.0, 1.0]), None, episodes, np.zeros(2, int), scale=Scale.NONE)
    np.testing.assert_allclose(got, [2.0, 0.0, -2.0, 0.0])


def credited(rule, rewards=TOTALS, valid=None, episodes=EPISODES, **columns):
    """Return the advantage of each token that `rule` computes, where each turn is credited with its own rewards."""
    lengths = np.array([sum(turn[0] for turn in one) for one in episodes])
    return computed(
        rule,
        rewards=rewards,
        groups=EPISODE_GROUPS,
        lengths=lengths,
        valid=np.ones(len(episodes), bool) if valid is None else valid,
        columns=columns,
        turns=Turns.of([[TurnReward(*turn) for turn in one] for one in episodes]),
    )


def test_reward_of_a_turn_is_discounted_by_the_number_of_tokens_until_the_end_of_that_turn():
    got = credited(RewardToGo(discount=0.5, credit=Credit.TURNS))[:6]
    # Rewards of the first rollout: 0.5 at token 1, 0 at token 2, 0.25 at token 5, which ends the rollout.
    earned = [0.0, 0.5, 0.0, 0.0, 0.0, 0.25]
    np.testing.assert_allclose(got, [sum(0.5 ** (s - t) * earned[s] for s in range(t, 6)) for t in range(6)])


def test_reward_of_a_turn_without_tokens_is_credited_to_the_tokens_before_it():
    episodes = [[(2, 0.0), (0, 1.0), (1, 0.5)], [(0, 3.0), (2, 0.0)], [(1, 0.0)], [(1, 0.0)], [(1, 0.0)]]
    got = credited(RewardToGo(credit=Credit.TURNS), np.array([1.5, 3.0, 0, 0, 0]), episodes=episodes)
    np.testing.assert_allclose(got, [1.5, 1.5, 0.5, 0.0, 0.0, 0.0, 0.0, 0.0])


def test_gae_with_turn_credit_equals_a_loop_over_the_definition():
    size = sum(tokens for one in EPISODES for tokens, _ in one)
    values = generator(4, "turns").normal(size=size)
    rule = GAE(discount=0.9, trace=0.7, whitening=Whitening.NONE, credit=Credit.TURNS)
    wanted, start = [], 0
    for i, one in enumerate(EPISODES):
        length = sum(tokens for tokens, _ in one)
        mine, earned, end = [*values[start : start + length], 0.0], np.zeros(length), 0
        for k, (tokens, reward) in enumerate(one):
            end += tokens
            earned[end - 1] = reward if k < len(one) - 1 else to_go(i, k)
        start += length
        surprise = [earned[t] + 0.9 * mine[t + 1] - mine[t] for t in range(length)]
        wanted += [sum(0.63**s * surprise[t + s] for s in range(length - t)) for t in range(length)]
    np.testing.assert_allclose(credited(rule, values=values), wanted, atol=1e-12)


def test_group_filter_with_turn_credit_computes_baselines_from_the_kept_rollouts_only():
    kept = np.array([False, True, True, True, True])  # the filter removes the longest rollout of group 0, its first
    got = credited(GroupFiltered(keep=2, credit=Credit.TURNS))
    np.testing.assert_allclose(got, credited(GroupRelative(credit=Credit.TURNS), valid=kept))
    assert (got[:6] == 0).all() and np.abs(got).max() > 0.5


def test_turn_credit_in_a_recipe_contradicts_importance_ratios_of_whole_sequences():
    chosen = resolve({"preset": "grpo", "adv": {"credit": "turns"}})
    assert chosen.adv == GroupRelative(credit=Credit.TURNS) and "G_{i,k}" in chosen.adv.formula
    sequences = dataclasses.replace(resolve("gspo"), adv=chosen.adv)
    assert any("adv.credit" in sentence for sentence in contradictions(sequences))


def test_role_baseline_subtracts_the_running_average_reward_of_the_agent_that_took_the_turn():
    draw = generator(3, "roles")
    rollouts, rewards, roles = [], [], []
    for _ in range(6):
        turns = [
            TurnReward(int(draw.integers(1, 4)), float(draw.normal()), agent)
            for agent in ("white", "black") * int(draw.integers(1, 3))
        ]
        rollouts.append(turns)
        rewards.append(sum(turn.reward for turn in turns) + float(draw.normal()))  # credited to the last turn
        roles += [f"chess/{turn.agent}" for turn in turns]
    valid = np.array([True, True, False, True, True, True])
    scored = Scored(
        rewards=np.array(rewards),
        groups=np.zeros(6, int),
        lengths=np.array([sum(turn.num_tokens for turn in turns) for turns in rollouts]),
        valid=valid,
        turns=Turns.of(rollouts),
        roles=Roles(roles, {"chess/white": 0.5}),
    )
    averages, expected = {"white": 0.5, "black": 0.0}, []
    for turns, reward, judged in zip(rollouts, rewards, valid, strict=True):
        earned = {agent: sum(t.reward for t in turns if t.agent == agent) for agent in averages}
        earned["black"] += reward - sum(t.reward for t in turns)
        for turn in turns:
            expected += [earned[turn.agent] - averages[turn.agent] if judged else 0.0] * turn.num_tokens
        if judged:
            averages = {agent: 0.9 * averages[agent] + 0.1 * earned[agent] for agent in averages}
    rule = RoleBaseline(decay=0.9)
    np.testing.assert_allclose(rule.advantages(scored, {}), expected)
    assert rule.baselines(scored) == pytest.approx({f"chess/{agent}": b for agent, b in averages.items()})
