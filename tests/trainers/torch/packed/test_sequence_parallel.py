"""Division of a micro-batch among several processes; `test_mesh.py` computes the parts in real processes."""

import numpy as np
import pytest

from pipelinerl.trainers.torch.mesh import refuse_heads
from pipelinerl.trainers.torch.packed.sequence_parallel import SequenceGroup, SequencePart, repeats_of
from pipelinerl.trainers.torch.packed.shared_beginnings import Distinct
from trainer_contract.conformance.probes import pack
from trainer_contract.errors import SpecError


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 7, 64])
def test_each_token_is_computed_and_each_next_token_predicted_by_exactly_one_process(processes):
    """The micro-batch has three rollouts, two of which share a prompt, whose tokens are computed only once."""
    batch = pack([[1, 2, 3, 4, 5], [1, 2, 3, 9], [7, 8, 6]], prompt=3)
    distinct, requested = Distinct.of(batch), np.flatnonzero(batch.position_ids > 0)
    assert len(distinct.kept) == batch.num_tokens - 3
    parts = [
        SequencePart.of(SequenceGroup(None, processes, place), distinct, batch.position_ids, requested)
        for place in range(processes)
    ]
    padded = parts[0].distinct
    computed = [padded.kept[part.own] for part in parts]
    assert {len(each) for each in computed} == {-(-len(distinct.kept) // processes)}, "all compute as much"
    assert [token for token in np.concatenate(computed) if token < batch.num_tokens] == distinct.kept.tolist()
    readers = parts[0].readers
    assert sorted(np.concatenate(readers).tolist()) == list(range(len(requested)))
    for part, its in zip(parts, readers, strict=True):
        before = padded.place[requested[its] - 1]
        assert ((before >= part.own.start) & (before < part.own.stop)).all(), "who has the token before predicts"
    assert (parts[0].position_ids[batch.num_tokens :] == np.arange(len(padded.kept) - len(distinct.kept))).all()


@pytest.mark.parametrize(
    ("query_heads", "key_heads", "processes"), [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 1, 8), (12, 6, 4), (32, 8, 16)]
)
def test_each_process_has_the_key_heads_of_its_query_heads(query_heads, key_heads, processes):
    repeats = repeats_of(query_heads, key_heads, processes)
    keys = np.repeat(np.arange(key_heads), repeats).reshape(processes, -1)
    reading = np.arange(query_heads) // (query_heads // key_heads)
    for own, queries in zip(keys, reading.reshape(processes, -1), strict=True):
        assert np.repeat(own, len(queries) // len(own)).tolist() == queries.tolist()


def test_number_of_heads_not_divisible_by_cp_is_rejected():
    refuse_heads(14, 7)
    with pytest.raises(SpecError, match=r"options\.mesh\.cp=4: attention has 14 heads, .* set cp to a divisor of 14"):
        refuse_heads(14, 4)
