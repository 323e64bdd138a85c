"""In each epoch, every group is in one mini-batch, which the seed decides; mini-batches have similar token counts."""

from itertools import pairwise

import numpy as np
import pytest

from pipelinerl import rng
from pipelinerl.training.batch import MiniBatching, deal
from pipelinerl.training.packing import apart
from tests.fakes.batches import batch_of, random_group

COLUMNS = ("token_ids", "position_ids", "loss_mask", "advantages", "old_logprobs", "temperatures")


@pytest.mark.parametrize("case", range(60))
def test_each_group_is_in_one_mini_batch_and_all_mini_batches_have_similar_numbers_of_tokens(case):
    draw = rng.generator(case, "sizes")
    count = int(draw.integers(1, 9))
    sizes = np.ceil(np.exp(draw.normal(4.0, 1.5, int(draw.integers(count, 80))))).astype(int).tolist()
    parts = deal(sizes, count, rng.generator(case, "deal"))
    assert sorted(each for part in parts for each in part) == list(range(len(sizes)))
    assert all(part == sorted(part) for part in parts)
    numbers, tokens = [len(part) for part in parts], [sum(sizes[each] for each in part) for part in parts]
    assert max(numbers) - min(numbers) <= 1
    assert max(tokens) - min(tokens) <= max(sizes), "by no more than the largest group"


def test_assignment_to_mini_batches_depends_on_seed_version_and_epoch():
    sizes = list(range(1, 25))

    def dealt(seed=3, producing=5, epoch=0):
        return MiniBatching(epochs=2, mini_batches=4, seed=seed).dealt(sizes, producing=producing, epoch=epoch)

    assert dealt() == dealt()
    others = (dealt(seed=4), dealt(producing=6), dealt(epoch=1))
    assert all(other != dealt() for other in others) and others[0] != others[1] != others[2]


def test_there_are_no_more_mini_batches_than_groups_with_tokens_to_train():
    mini_batching = MiniBatching(mini_batches=4)
    for sizes, count in (([5, 0, 0, 3, 0], 2), ([0, 0], 1), ([1, 1, 1, 1], 4)):
        assert len(mini_batching.dealt(sizes, producing=1, epoch=0)) == count
    for part in mini_batching.dealt([5, 0, 7, 0, 0, 3, 2], producing=1, epoch=0):
        assert sum(each in (0, 2, 5, 6) for each in part) == 1, "each has something to compute"


# --- mini-batches of a batch ------------------------------------------------------------------------------------------


def ragged_batch(count=11):
    draw = rng.generator(1, "ragged_batch")
    rewards = [(1.0, 1.0, 1.0) if index % 4 == 3 else (0.0, 1.0, float(draw.uniform())) for index in range(count)]
    return [random_group(draw, index, each, prompt=(1, 5), sampled=(1, 12)) for index, each in enumerate(rewards)]


def whole(objective="grpo", *, groups=None, width=1):
    batch = batch_of(
        ragged_batch() if groups is None else groups,
        objective,
        producing=2,
        token_budget=40,
        width=width,
        mini_batching=MiniBatching(epochs=3, mini_batches=4, seed=9),
    )
    columns = [np.arange(each.num_tokens, dtype=np.float32) + 100 * i for i, each in enumerate(batch.micro_batches)]
    return batch.with_columns({"old_logprobs": columns})


@pytest.mark.parametrize("width", [1, 2])
def test_every_epoch_of_mini_batches_trains_each_rollout_once_with_unchanged_tokens_and_columns(width):
    batch = whole(width=width)
    expected = {
        member: segment
        for packed in batch.packed
        for member, segment in zip(packed.members, apart(packed.micro_batch), strict=True)
    }
    divisions = []
    for epoch in range(3):
        seen, groups = [], []
        for mini_batch in [each for each in batch.mini_batches() if each.number // 4 == epoch]:
            groups.append({int(batch.scored.groups[m]) for packed in mini_batch.packed for m in packed.members})
            for packed in mini_batch.packed:
                assert packed.micro_batch.num_tokens <= 40
                for member, segment in zip(packed.members, apart(packed.micro_batch), strict=True):
                    seen.append(member)
                    for name in COLUMNS:
                        assert np.array_equal(getattr(segment, name), getattr(expected[member], name)), name
        assert sorted(seen) == sorted(expected)
        assert len(groups) == 4 and not any(a & b for a, b in pairwise(groups))
        divisions.append(groups)
    assert divisions[0] != divisions[1] != divisions[2]


@pytest.mark.parametrize("objective", ["grpo", "dapo", "pipelinerl", {"preset": "grpo", "agg": "batch"}], ids=str)
def test_token_weights_of_a_mini_batch_equal_those_of_a_separate_batch_of_the_same_groups(objective):
    """A mini-batch takes its advantages from the batch; they are the same, because its groups are whole."""
    groups, batch = ragged_batch(), whole(objective)
    for part in batch.mini_batches():
        _, token_weights = list(part.portions(part.number // 4))[part.number % 4]
        chosen = sorted({int(batch.scored.groups[i]) for i in range(len(token_weights)) if token_weights[i] > 0})
        alone = batch_of([groups[i] for i in chosen], objective, token_budget=40)
        ours = {m: w for packed in part.packed for m, w in zip(packed.members, _weights(packed), strict=True)}
        offset = np.cumsum([0, *(len(groups[i].rollouts) for i in chosen)])
        theirs = {
            3 * chosen[int(np.searchsorted(offset, m, side="right")) - 1] + m % 3: w
            for packed in alone.packed
            for m, w in zip(packed.members, _weights(packed), strict=True)
        }
        assert ours == theirs and len(ours) > 3


def _weights(packed):
    return [(float(each.weights.max()), each.advantages.tolist()) for each in apart(packed.micro_batch)]
