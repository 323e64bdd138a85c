"""Rollouts are packed into micro-batches whole, once and within a token budget, with work balanced between ranks."""

import numpy as np
from hypothesis import given, strategies as st

from pipelinerl import rng
from pipelinerl.training.packing import WeightedRollout, dealt, first_fit, interleaved, pack, work
from tests.fakes.rollouts import rollout

SIZES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 20)), min_size=1, max_size=40)


def weighted(sizes):
    made = []
    for number, (prompt, sampled) in enumerate(sizes):
        one = rollout(
            prompt=[100 * number + i for i in range(prompt)],
            sampled=[100 * number + 50 + i for i in range(sampled)],
            logprob=-0.01 * (number + 1),
        )
        made.append(
            WeightedRollout(rollout=one, advantages=np.arange(sampled) + number - 1.5, token_weight=1.0 / (number + 1))
        )
    return made


def unpack(batch):
    names = ("token_ids", "position_ids", "loss_mask", "advantages", "weights", "behavior_logprobs", "temperatures")
    segments = [{name: [] for name in names} for _ in range(batch.num_segments)]
    for t in range(batch.num_tokens):
        for name in names:
            segments[int(batch.segment_ids[t])][name].append(float(getattr(batch, name)[t]))
    return segments


def expected(member):
    turn = member.rollout.turns[0]
    context, sampled = turn.context_token_ids.tolist(), turn.token_ids.tolist()
    blank, n = [0.0] * len(context), len(sampled)
    return {
        "token_ids": [*context, *sampled],
        "position_ids": list(range(len(context) + n)),
        "loss_mask": [*blank, *[1.0] * n],
        "advantages": [*blank, *member.advantages.tolist()],
        "weights": [*blank, *[float(np.float32(member.token_weight))] * n],
        "behavior_logprobs": [*blank, *turn.behavior_logprobs.tolist()],
        "temperatures": [1.0] * (len(context) + n),
    }


@given(SIZES, st.integers(10, 100), st.integers(1, 5))
def test_every_rollout_is_packed_once_and_undivided_within_the_token_budget(sizes, budget, width):
    members = weighted(sizes)
    packed = pack(members, token_budget=budget, width=width)
    got = sorted((s for batch, _ in packed for s in unpack(batch)), key=lambda s: s["token_ids"])
    for batch, numbers in packed:
        assert unpack(batch) == [expected(members[number]) for number in numbers]
        assert batch.num_tokens <= budget or batch.num_segments == 1
    assert got == sorted((expected(member) for member in members), key=lambda s: s["token_ids"])


@given(SIZES, st.integers(10, 100), st.integers(2, 5))
def test_every_trainer_rank_gets_a_micro_batch_if_there_are_enough_rollouts(sizes, budget, width):
    """The number of micro-batches is a multiple of the number of ranks, unless a micro-batch is a single rollout."""
    packed = pack(weighted(sizes), token_budget=budget, width=width)
    if len(packed) % width:
        assert any(len(numbers) == 1 for _, numbers in packed), "a bin that could be halved was not"
    if len(sizes) >= width:
        assert len(packed) >= width


def test_packing_balances_the_work_of_trainer_ranks_in_total_and_per_micro_batch():
    """For heavy-tailed lengths, work is balanced within 0.5 % in total, and within 5 % if ranks wait for each other
    after every micro-batch.
    """
    lock_step = []
    for seed in range(20):
        lengths = np.clip(rng.generator(seed, "lengths").lognormal(6.5, 1.0, 512), 16, 8192).astype(int).tolist()
        order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
        for width in (2, 4):
            parts = dealt(order, lengths, width)
            loads = [sum(work(lengths[i]) for i in part) for part in parts]
            assert max(loads) / np.mean(loads) <= 1.005
            bins = interleaved([first_fit(part, lengths, 16384) for part in parts], lengths)
            loads = [sum(work(lengths[i]) for i in bin) for bin in bins]
            assert len(bins) % width == 0
            lock_step.append(np.reshape(loads, (-1, width)).max(axis=1).sum() / (sum(loads) / width))
    assert np.median(lock_step) <= 1.05


def test_rollouts_of_one_prompt_share_a_micro_batch_if_they_fit():
    groups = [
        [rollout(prompt=[group] * 5, sampled=[7] * (1 + (group + i) % 4)) for i in range(4)] for group in range(6)
    ]
    mixed = [groups[group][i] for i in range(4) for group in range(6)]
    members = [
        WeightedRollout(rollout=one, advantages=np.zeros(one.num_sampled_tokens), token_weight=1) for one in mixed
    ]
    for batch, numbers in pack(members, token_budget=62):
        assert batch.num_tokens == 60, "the rollouts of two prompts"
        assert len({mixed[number].turns[0].context_token_ids[0] for number in numbers}) == 2
