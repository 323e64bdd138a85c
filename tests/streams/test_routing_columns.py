"""Group records store the experts to which a mixture-of-experts model routed each token, and reject impossible ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pipelinerl.errors import RecordError
from pipelinerl.streams.records import decode_columns, decode_group, encode_group
from pipelinerl.streams.routing_columns import CONTEXTS, SAMPLED, turn_routing
from pipelinerl.types import Rollout, RolloutGroup, Turn
from tests.fakes.rollouts import group
from tests.fakes.routing import routed, routed_group


def turns(of: RolloutGroup) -> list[Turn]:
    return [turn for rollout in of.rollouts for turn in rollout.turns]


def test_routed_experts_of_each_turn_are_unchanged_after_encoding_and_decoding() -> None:
    several = Rollout(
        turns=tuple(routed(turn, layers=3, top_k=2, seed=9) for turn in (*turns(group(0)), *turns(group(0)))),
        verdict=group(0).rollouts[0].verdict,
        finish_reason="stop",
        temperature=1.0,
    )
    given = routed_group(3, layers=3, top_k=2)
    given = replace(given, rollouts=(*given.rollouts, several))
    firsts: dict[bytes, Any] = {}
    for turn in turns(given):
        firsts.setdefault(turn.context_token_ids.tobytes(), turn.context_routed_experts)
    for before, after in zip(turns(given), turns(decode_group(encode_group(given))), strict=True):
        np.testing.assert_array_equal(after.routed_experts, before.routed_experts)
        np.testing.assert_array_equal(after.context_routed_experts, firsts[before.context_token_ids.tobytes()])
        assert after.routed_experts is not None and after.routed_experts.dtype == np.uint8


def test_routed_experts_of_a_shared_prompt_are_stored_once() -> None:
    bare, given = group(3, rewards=(0.0,) * 8), routed_group(3, rewards=(0.0,) * 8, layers=4, top_k=8)
    added = len(encode_group(given)) - len(encode_group(bare))
    tokens = 8 * 2 + 2  # eight answers of 2 tokens, and one shared prompt of 2 tokens
    assert tokens * 32 <= added <= tokens * 32 + 100, f"{added} bytes for {tokens} tokens"
    found = decode_columns(encode_group(given))
    assert {name: column.shape for name, column in found.items()} == {SAMPLED: (16, 4, 8), CONTEXTS: (2, 4, 8)}


def test_record_of_a_group_without_routed_experts_has_no_routing_columns() -> None:
    assert decode_columns(encode_group(group(3))) == {}
    assert all(turn.routed_experts is None for turn in turns(decode_group(encode_group(group(3)))))


@pytest.mark.parametrize(
    "changes",
    [
        {"routed_experts": None},
        {"context_routed_experts": None},
        {"routed_experts": np.zeros((3, 2, 2), np.uint8)},
        {"routed_experts": np.zeros((2, 2, 3), np.uint8)},
        {"routed_experts": np.zeros((2, 4), np.uint8)},
        {"routed_experts": np.zeros((2, 2, 2), np.int64)},
        {"routed_experts": np.zeros((2, 2, 2), np.uint16)},
    ],
)
def test_routed_experts_with_a_wrong_shape_are_rejected_when_a_group_is_encoded(changes: Mapping[str, Any]) -> None:
    given = routed_group(3)
    second = replace(given.rollouts[1], turns=(replace(given.rollouts[1].turns[0], **changes),))
    rollouts = (second, given.rollouts[0])  # of a shared prompt, only the first copy is stored
    with pytest.raises(RecordError, match="routed experts"):
        encode_group(replace(given, rollouts=rollouts))


SHAPES: dict[str, Any] = {"lengths": [2, 1], "turn_contexts": [0, 0], "context_lengths": [4]}


@pytest.mark.parametrize(
    ("sampled", "contexts"),
    [
        (np.zeros((3, 2, 2), np.uint8), None),
        (None, np.zeros((4, 2, 2), np.uint8)),
        (np.zeros((3, 2, 2), np.uint8), np.zeros((4, 2, 3), np.uint8)),
        (np.zeros((3, 2, 2), np.uint8), np.zeros((4, 2, 2), np.uint16)),
        (np.zeros((3, 2, 2), np.float32), np.zeros((4, 2, 2), np.float32)),
        (np.zeros((3, 4), np.uint8), np.zeros((4, 4), np.uint8)),
    ],
)
def test_routing_columns_that_contradict_the_groups_tokens_are_rejected(sampled: Any, contexts: Any) -> None:
    columns = {name: each for name, each in ((SAMPLED, sampled), (CONTEXTS, contexts)) if each is not None}
    with pytest.raises(ValueError, match="routed experts"):
        turn_routing(columns, **SHAPES)
    good = {SAMPLED: np.zeros((3, 2, 2), np.uint8), CONTEXTS: np.zeros((4, 2, 2), np.uint8)}
    assert [each.sampled.shape[0] for each in turn_routing(good, **SHAPES) if each.sampled is not None] == [2, 1]


def test_record_with_only_one_routing_column_is_rejected_with_a_reason() -> None:
    """The reason matters because `RolloutReader` moves rejected records to the dead-letter stream with their reason."""
    record = encode_group(group(3), {SAMPLED: np.zeros((4, 2, 2), np.uint8)})
    with pytest.raises(RecordError, match="need both columns"):
        decode_group(record)
