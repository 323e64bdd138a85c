"""The experts to which an engine routed each token: their position in micro-batches, missing ones, validity checks."""

import re
from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.enums import NoSignal
from pipelinerl.staleness import StalenessBounds
from pipelinerl.training.packing import WeightedRollout, alone, apart, joined, pack, prefixes
from pipelinerl.training.rollouts.admission import ConsumedLedger, GroupOutcome, Lineage, fault_of, without_routing
from pipelinerl.training.rollouts.batcher import Batcher, StepBudget
from tests.fakes.rollouts import group
from tests.fakes.routing import routed_group
from trainer_contract.types import RoutingShape

ROUTING = RoutingShape(layers=2, experts=4, top_k=2)


def expected(of):
    turns = [rollout.turns[0] for rollout in of.rollouts]
    return np.concatenate([part for turn in turns for part in (turn.context_routed_experts, turn.routed_experts)])


def routed_column(batch):
    assert batch.routed_experts is not None
    return batch.routed_experts


def test_packing_keeps_the_routed_experts_of_each_token():
    given = routed_group(0, rewards=(0.0, 1.0, 0.5))
    np.testing.assert_array_equal(routed_column(alone(given.rollouts)), expected(given))
    members = [WeightedRollout(rollout=rollout, advantages=np.ones(2), token_weight=1.0) for rollout in given.rollouts]
    for batch, (member,) in pack(members, token_budget=4):
        one = replace(given, rollouts=(given.rollouts[member],))
        np.testing.assert_array_equal(routed_column(batch), expected(one))


def test_segments_that_are_separated_and_rejoined_keep_their_routed_experts():
    given = routed_group(0, rewards=(0.0, 1.0, 0.5))
    batch = alone(given.rollouts)
    parts = apart(batch)
    again = joined(parts[::-1], token_weights=[0.0] * 3, owners=[2, 1, 0])
    np.testing.assert_array_equal(
        routed_column(again), routed_column(batch).reshape(3, 4, 2, 2)[::-1].reshape(12, 2, 2)
    )
    through = np.zeros(12, np.bool_)
    through[[2, 7]] = True
    cut, _ = prefixes(batch, through=through)
    np.testing.assert_array_equal(routed_column(cut), routed_column(batch)[[0, 1, 2, 4, 5, 6, 7]])


def test_micro_batch_has_no_routed_experts_if_some_rollouts_lack_them_or_their_shapes_differ():
    mixed = (*routed_group(0).rollouts, *group(0).rollouts)
    assert alone(mixed).routed_experts is None
    other = (*routed_group(0).rollouts, *routed_group(0, layers=3).rollouts)
    assert alone(other).routed_experts is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (routed_group(0), ""),
        (group(0), "must come with every rollout"),
        (routed_group(0, layers=3), r"uint8 \[T, layers, top_k\] = \(8, 2, 2\)"),
        (routed_group(0, top_k=1), r"got uint8 \(8, 2, 1\)"),
        (routed_group(0, experts=300), "got uint16"),
        (routed_group(0, experts=40), r"must lie in 0\.\.3, got \d+"),
    ],
)
def test_group_with_missing_or_impossible_routed_experts_is_reported_as_faulty(given, why):
    fault = fault_of(given, vocab_size=None, routing=ROUTING)
    assert (not fault) if not why else re.search(why, fault), fault


def batcher(routing, ended):
    return Batcher(
        ledger=ConsumedLedger(),
        lineage=Lineage(1, 0),
        no_signal=NoSignal.FILTER,
        routing=routing,
        ended=lambda groups, outcome, why: ended.extend((each.index, outcome, why) for each in groups),
    )


def test_groups_with_missing_or_impossible_routed_experts_are_filtered_if_routing_is_replayed():
    ended = []
    waiting = batcher(ROUTING, ended)
    for each in (routed_group(0), group(1), routed_group(2, experts=40)):
        waiting.offer(each)
    assert waiting.waiting == [0]
    assert ended == [(1, GroupOutcome.FILTERED, "not computable"), (2, GroupOutcome.FILTERED, "not computable")]


def test_routed_experts_are_removed_if_routing_is_not_replayed():
    """A run that resumes with routing replay disabled still reads groups that contain routed experts."""
    waiting = batcher(None, [])
    waiting.offer(routed_group(0))
    (taken,) = waiting.take(StepBudget(rollouts=2), producing=1, bounds=StalenessBounds(1, 8)) or []
    assert all(turn.routed_experts is None for rollout in taken.rollouts for turn in rollout.turns)
    assert without_routing(taken) is taken
