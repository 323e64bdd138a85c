"""Model versions, numbers of tokens and outcomes of rollouts and groups."""

from dataclasses import replace

from tests.fakes.rollouts import group, rollout


def test_oldest_and_newest_version_of_a_rollout_are_over_the_tokens_of_all_turns():
    first = rollout(spans=[(3, 1), (5, 1)]).turns[0]
    second = rollout(spans=[(4, 1), (7, 1)]).turns[0]
    both = replace(rollout(), turns=(first, second))
    assert (both.oldest_version, both.newest_version) == (3, 7)
    assert (both.num_sampled_tokens, both.num_tokens) == (4, 8)


def test_oldest_version_of_a_group_is_that_of_its_oldest_rollout():
    mixed = replace(group(0), rollouts=(rollout(version=9, epoch=2), rollout(version=4, epoch=3, sampled=(1, 2, 3))))
    assert (mixed.oldest_version, mixed.epoch, mixed.num_tokens) == (4, 2, 4 + 5)
