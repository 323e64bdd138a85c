"""Branching episodes are packed as segments (paths from the first turn to a last turn), and each token trains once."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from pipelinerl.objective.presets import resolve
from pipelinerl.training.batch import BatchRules, MiniBatching
from pipelinerl.training.packing import SegmentTable, WeightedRollout, alone, pack
from pipelinerl.training.rollouts.admission import signal_of, teacher
from pipelinerl.types import ROOT
from tests.fakes.batches import batch_of, bigram
from tests.fakes.rollouts import as_roots, episode, group, rollout
from trainer_contract.batch import check
from trainer_contract.errors import BatchError
from trainer_contract.types import OptimizerSpec

VOCAB = 12
#: Presets that together cover loss terms per token, terms per rollout (a ratio or a weight), and old log-probs.
CHOICES = ("grpo", "dr_grpo", "dapo", "gspo", "gmpo", "pipelinerl", "topr")


def linear(reward=1.0, *, offset=0):
    return episode(
        [((0, 1), (2, 3 + offset)), ((4,), (5,)), ((6, 7), (8, 9, 2))], reward=reward, versions=(3, 4, 5), logprob=-2.0
    )


def forked(reward=0.0):
    """Return an episode whose first turn has two continuations, of which the second is continued once more, and a
    separate conversation of one turn.
    """
    return episode(
        [((0, 1), (2, 3)), ((4,), (5, 6)), ((7,), (8,)), ((9,), (2, 3)), ((1, 1, 4), (5, 7))],
        (ROOT, 0, 0, 2, ROOT),
        reward=reward,
        versions=(3, 4, 4, 5, 6),
        logprob=-2.0,
    )


def episodes(of=lambda one: one):
    single = rollout(reward=0.75, prompt=(0, 1), sampled=(2, 4, 8), logprob=-2.0)
    first = replace(group(0), rollouts=(of(linear()), of(forked()), single))
    second = replace(group(1), rollouts=(of(linear(0.0, offset=1)), of(forked(1.0))))
    return [first, second]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory):
    return bigram(tmp_path_factory.mktemp("bigram"), vocab=VOCAB, optimizer=OptimizerSpec(grad_clip=0.0))


def gradient(trainer, micro_batches, objective):
    if "old_logprobs" in objective.needs:
        micro_batches = [
            replace(each, old_logprobs=old)
            for each, old in zip(micro_batches, trainer.forward(micro_batches), strict=True)
        ]
    trainer.backward(micro_batches, objective)
    worker = trainer._worker
    assert worker.gradient is not None
    made = worker.gradient.copy()
    trainer.discard_gradient()
    return made


# --- the tree --------------------------------------------------------------------------------------------------------


def test_segments_of_a_branching_episode_are_the_paths_from_its_first_to_its_last_turns():
    one = forked()
    numbers = {id(turn): number for number, turn in enumerate(one.turns)}
    paths = [[numbers[id(turn)] for turn in segment.turns] for segment in one.segments]
    assert paths == [[0, 1], [0, 2, 3], [4]]
    assert [list(segment.trained) for segment in one.segments] == [[0, 1], [2, 3], [4]]
    assert [segment.num_repeated for segment in one.segments] == [0, 1, 0]
    assert one.num_sampled_tokens == 9 and one.num_tokens == 7 + 9 + 5
    for single in (linear(), replace(linear(), parents=(ROOT, 0, 1))):
        ((turns, trained),) = single.segments
        assert turns == single.turns and list(trained) == [0, 1, 2]


@st.composite
def trees(draw):
    """Draw rollouts whose turns, at most 8 each, form any tree; no two tokens of a draw have the same id."""
    made, number = [], 0
    for _ in range(draw(st.integers(1, 6))):
        turns = []
        for _ in range(draw(st.integers(1, 8))):
            context, sampled = draw(st.integers(1, 5)), draw(st.integers(1, 4))
            turns.append((range(number, number + context), range(number + context, number + context + sampled)))
            number += context + sampled
        parents = [draw(st.integers(ROOT, place - 1)) for place in range(len(turns))]
        made.append(episode(turns, draw(st.sampled_from([(), tuple(parents)]))))
    return made


@given(trees(), st.integers(5, 80), st.integers(1, 3), st.booleans())
@settings(max_examples=100, deadline=None)
def test_each_sampled_token_of_a_branching_episode_trains_once_with_all_turns_before_it_as_context(
    rollouts, budget, width, unsplit
):
    weighted = [
        WeightedRollout(
            rollout=one,
            advantages=np.concatenate([turn.token_ids for turn in one.turns]).astype(float),
            token_weight=1.0 + number,
        )
        for number, one in enumerate(rollouts)
    ]
    packed = pack(weighted, token_budget=budget, width=width, whole=unsplit)
    table = SegmentTable.of(rollouts)
    trained = Counter()
    for batch, members in packed:
        check(batch, vocab_size=2**31)
        trained.update(batch.token_ids[batch.loss_mask].tolist())
        np.testing.assert_array_equal(batch.advantages, batch.token_ids * batch.loss_mask)
        assert batch.num_tokens <= budget or len({table.owners[member] for member in members}) == 1
        assert batch.num_tokens <= budget or batch.num_segments == 1 or unsplit
        for place, member in enumerate(members):
            its = batch.segment_ids == place
            path = [ids for turn in table.segments[member].turns for ids in (turn.context_token_ids, turn.token_ids)]
            np.testing.assert_array_equal(batch.token_ids[its], np.concatenate(path))
            weights = batch.weights[its & batch.loss_mask]
            assert (weights == 1.0 + table.owners[member]).all()
    sampled = [token for one in rollouts for turn in one.turns for token in turn.token_ids.tolist()]
    assert trained == Counter(sampled)
    places = [number for number, (_, members) in enumerate(packed) for _ in members]
    owners = [table.owners[member] for _, members in packed for member in members]
    for owner, one in enumerate(rollouts):
        spread = {place for place, own in zip(places, owners, strict=True) if own == owner}
        assert len(spread) == 1 or (not unsplit and one.num_tokens > budget), "they share one"


@given(trees(), st.integers(5, 80))
@settings(max_examples=30, deadline=None)
def test_every_epoch_of_mini_batches_packs_the_same_tokens_of_branching_episodes(rollouts, budget):
    right, wrong = (rollout(reward=reward).verdict for reward in (1.0, 0.0))
    groups = [
        replace(group(number), rollouts=(replace(one, verdict=right), replace(one, verdict=wrong)))
        for number, one in enumerate(rollouts)
    ]
    several = MiniBatching(epochs=2, mini_batches=2, seed=1)
    batch = batch_of(groups, "gspo", token_budget=budget, mini_batching=several)
    epochs = {0: Counter(), 1: Counter()}
    for mini_batch in batch.mini_batches():
        for packed in mini_batch.packed:
            its = packed.micro_batch
            check(its, vocab_size=2**31)
            pairs = zip(its.token_ids[its.loss_mask].tolist(), its.advantages[its.loss_mask].tolist(), strict=True)
            epochs[mini_batch.number // 2].update(pairs)
            owners = {batch.segments.owners[member] for member in packed.members}
            ids = its.segment_ids if its.rollout_ids is None else its.rollout_ids
            assert len(owners) == ids.max() + 1, "a rollout's segments share one ratio"
    assert epochs[0] == epochs[1] and set(epochs[0].values()) == {1}


# --- gradients -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("budget", [1000, 14, 1])
def test_gradient_does_not_depend_on_whether_an_episode_is_stored_as_a_tree_or_as_separate_paths(
    choice, budget, trainer
):
    objective = resolve(choice, max_tokens=8)
    whole = gradient(trainer, batch_of(episodes(), objective).micro_batches, objective)
    assert np.abs(whole).max() > 1e-3
    for stored in (lambda one: one, as_roots):
        batch = batch_of(episodes(stored), objective, token_budget=budget)
        np.testing.assert_allclose(gradient(trainer, batch.micro_batches, objective), whole, rtol=1e-6, atol=1e-9)


# --- weights, versions and credit ------------------------------------------------------------------------------------


def test_tokens_of_a_branching_episode_have_together_the_weight_of_one_rollout():
    objective = resolve("grpo")
    batch = batch_of(episodes(), objective)
    totals = np.zeros(5)
    for number, its in enumerate(batch.micro_batches):
        np.add.at(totals, np.array(batch.rollouts_of(number))[its.segment_ids], its.weights)
    np.testing.assert_allclose(totals, [1 / 6] * 3 + [1 / 4] * 2, rtol=1e-6)


def test_turn_credit_gives_the_tokens_of_a_turn_its_reward_to_go_in_whichever_segment_they_train():
    objective = resolve({"preset": "dr_grpo", "adv": {"credit": "turns"}}, max_tokens=8)
    tree = (ROOT, 0, 0, ROOT)
    turns = [((0, 1), (2, 3)), ((4,), (5,)), ((6,), (7, 8)), ((9,), (10,))]
    one = episode(turns, tree, reward=2.0, rewards=(0.5, 0.0, 1.0, 0.0))
    other = episode(turns, tree, reward=0.0)
    made = replace(group(0), rollouts=(one, other))
    batch = batch_of([made], objective, token_budget=4)
    assert len(batch.packed) > 1, "its segments lie in several micro-batches"
    got = {
        (owner, token): advantage
        for number, its in enumerate(batch.micro_batches)
        for owner, token, advantage in zip(
            np.array(batch.rollouts_of(number))[its.segment_ids[its.loss_mask]].tolist(),
            its.token_ids[its.loss_mask].tolist(),
            its.advantages[its.loss_mask].tolist(),
            strict=True,
        )
    }
    # The rewards to go of the four turns are 2, 1.5, 1.5 and 0.5; the group's other episode has no rewards.
    to_go = {2: 2.0, 3: 2.0, 5: 1.5, 7: 1.5, 8: 1.5, 10: 0.5}
    expected = {(owner, token): (0.5 - owner) * amount for owner in (0, 1) for token, amount in to_go.items()}
    assert got == pytest.approx(expected)


def test_group_with_equal_total_rewards_trains_with_turn_credit_if_the_rewards_of_turns_differ():
    turns = [((0, 1), (2,)), ((4,), (5,))]
    early, late = (episode(turns, reward=1.0, rewards=rewards) for rewards in ((1.0, 0.0), (0.0, 1.0)))
    made = replace(group(0), rollouts=(early, late))
    same = replace(made, rollouts=(early, early))
    by_turns, by_episode = resolve({"preset": "grpo", "adv": {"credit": "turns"}}), resolve("grpo")
    for objective, of, expected in ((by_turns, made, True), (by_turns, same, False), (by_episode, made, False)):
        assert teacher(objective, BatchRules(token_budget=1))(of) is expected
        assert signal_of(objective)(of) is expected


@pytest.mark.parametrize("ids", [[0, 0, 1, 1, 1], [-1, -1, -1, 0, 0], [0, 0, 0, 2, 2]])
def test_rollout_ids_that_are_negative_skip_a_number_or_change_within_a_segment_are_rejected(ids):
    batch = alone([rollout(prompt=(1, 2), sampled=(3,)), rollout(prompt=(1,), sampled=(3,))])
    with pytest.raises(BatchError, match="rollout_ids must"):
        check(replace(batch, rollout_ids=np.array(ids, np.int32)), vocab_size=VOCAB)
