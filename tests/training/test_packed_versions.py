"""The column `behavior_versions` has, for each sampled token, the model version that sampled it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipelinerl.training.packing import WeightedRollout, pack
from tests.fakes.rollouts import rollout


def test_behavior_version_of_each_packed_token_is_the_model_version_that_sampled_it() -> None:
    two_turns = replace(
        rollout(),
        turns=(
            rollout(prompt=[1, 2], sampled=[3, 4, 5], spans=[(4, 2), (7, 1)]).turns[0],
            rollout(prompt=[6], sampled=[7, 8], spans=[(7, 1), (8, 1)]).turns[0],
        ),
    )
    short = rollout(prompt=[1], sampled=[2], version=9)
    weighted = [
        WeightedRollout(rollout=each, advantages=np.ones(each.num_sampled_tokens), token_weight=1.0)
        for each in (short, two_turns)
    ]
    (together,) = pack(weighted, token_budget=100)
    assert together.micro_batch.behavior_versions is not None
    assert together.micro_batch.behavior_versions.dtype == np.int32
    assert together.micro_batch.behavior_versions.tolist() == [0, 0, 4, 4, 7, 0, 7, 8, 0, 9]
    apart = [packed.micro_batch.behavior_versions for packed in pack(weighted, token_budget=8)]
    assert [column.tolist() for column in apart if column is not None] == [[0, 0, 4, 4, 7, 0, 7, 8], [0, 9]]
