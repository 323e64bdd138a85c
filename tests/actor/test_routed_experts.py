"""The actor requests routed experts if the trainer replays them, and includes them in the rollouts."""

import numpy as np
import pytest

from pipelinerl.actor.rollouts import Answer, assemble, rollouts_of
from pipelinerl.actor.single_turn import chat_request
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import RecordError
from pipelinerl.numerics.routed_experts import on_the_wire
from pipelinerl.training.canary_check import canary_rollouts
from pipelinerl.training.packing import alone
from pipelinerl.types import Outcome, Purpose, Verdict
from tests.actor.test_actor import completion, order

PROMPT = np.arange(1 * 2 * 2, dtype=np.uint8).reshape(1, 2, 2)
SAMPLED = np.arange(10, 10 + 3 * 2 * 2, dtype=np.uint8).reshape(3, 2, 2)


def routed(*, prompt=PROMPT, sampled=SAMPLED):
    """Return an answer to a prompt of two tokens: two samples of three tokens each, with their routed experts."""
    as_sent = None if sampled is None else on_the_wire(sampled)
    answer = completion("a", "b", routed_experts=as_sent)
    return answer.model_copy(update={"prompt_routed_experts": None if prompt is None else on_the_wire(prompt)})


def group_of(answer, replay=RoutingReplay.ROLLOUT):
    verdict = Verdict(outcome=Outcome.CORRECT, reward=1.0)
    answers = [Answer(answer, choice, verdict) for choice in answer.choices]
    return assemble(order(7), rollouts_of(order(7), answers, replay=replay), actor="a")


def test_rollouts_contain_the_routed_experts_of_prompt_and_sampled_tokens():
    for rollout in group_of(routed()).rollouts:
        (turn,) = rollout.turns
        assert turn.context_routed_experts is not None and len(turn.context_routed_experts) == 2
        np.testing.assert_array_equal(turn.context_routed_experts[1:], PROMPT)
        np.testing.assert_array_equal(turn.routed_experts, SAMPLED)


def test_routed_experts_are_dropped_if_routing_replay_is_off():
    (turn,) = group_of(routed(), RoutingReplay.OFF).rollouts[0].turns
    assert turn.routed_experts is None and turn.context_routed_experts is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (routed(prompt=None), "needs an engine that tells them"),
        (routed(sampled=None), "needs an engine that tells them"),
        (routed(prompt=SAMPLED), "expected routed experts of 1 prompt tokens"),
        (routed(prompt=PROMPT.astype(np.uint16)), "like those of the answer"),
        (routed(prompt=PROMPT[:, :1]), "like those of the answer"),
        (routed(sampled=SAMPLED[:2]), "expected routed experts of 3 tokens, got 2"),
    ],
)
def test_answer_without_routed_experts_is_rejected(answer, message):
    with pytest.raises(RecordError, match=message):
        group_of(answer)


def test_routed_experts_are_requested_for_training_but_not_for_evaluation():
    assert chat_request(order(1), replay=RoutingReplay.ROLLOUT).return_routed_experts
    assert not chat_request(order(1)).return_routed_experts
    evaluation = order(1, purpose=Purpose.EVALUATION)
    assert not chat_request(evaluation, replay=RoutingReplay.ROLLOUT).return_routed_experts


def test_canary_batch_contains_the_routed_experts_of_its_answer():
    answer = routed()
    proven = answer.model_copy(
        update={"choices": [each.model_copy(update={"version_spans": [(4, 3)]}) for each in answer.choices]}
    )
    column = alone(canary_rollouts(proven, version=4)).routed_experts
    assert column is not None
    np.testing.assert_array_equal(column, np.concatenate([PROMPT * 0, PROMPT, SAMPLED] * 2))
