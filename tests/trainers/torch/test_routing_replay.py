"""The torch trainer computes tokens with given experts: in forward, in backward, packed and with shared prefixes."""

from dataclasses import replace

import numpy as np
import pytest

from pipelinerl.models import torch_routers
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from tests.fakes.torch_trainers import gradients, started
from trainer_contract.errors import BatchError
from trainer_contract.types import Head, MicroBatch

OBJECTIVE = resolve("pipelinerl")


def own_choice(trainer, batch):
    """Return a column of routed experts that makes the trainer's routers repeat their own choice."""
    model = trainer._worker.loaded.model.model
    forwards = [router.forward for router in torch_routers.routers_of(model)]
    log = torch_routers.TorchRouteLog(model, trainer._worker.loaded.model.routing)
    log.is_on = True
    trainer.forward([batch])
    for router, forward in zip(torch_routers.routers_of(model), forwards, strict=True):
        router.forward = forward
    chosen = log.take()
    assert len(chosen) == batch.num_tokens, "no prompt may be shared here"
    return np.concatenate((chosen[:1] * 0, chosen[:-1]))


def chosen_at_random(batch):
    return generator(1, "routing").permuted(np.tile(np.arange(4, dtype=np.uint8), (batch.num_tokens, 2, 1)), axis=2)[
        :, :, :2
    ]


def test_replaying_the_trainers_own_expert_routing_changes_results_only_by_rounding(model_path, micro_batch):
    """A segment's last token, whose output is not used, may have other experts, so expert matmuls differ in size."""
    batch, results = micro_batch(), []
    for checkpointing in (False, True):  # checkpointing recomputes layers in backward
        trainer = started(model_path("qwen3_moe"), gradient_checkpointing=checkpointing)
        for each in (batch, replace(batch, routed_experts=own_choice(trainer, batch))):
            loss = trainer.backward([each], OBJECTIVE)[0]
            results.append((trainer.forward([each])[0], loss.predictions, gradients(trainer)))
            trainer.discard_gradient()
    scale = max(float(gradient.abs().max()) for gradient in results[0][2].values())
    for predictions, losses, gradient in results[1:]:
        np.testing.assert_allclose(predictions, results[0][0], atol=2e-5)
        np.testing.assert_allclose(losses, results[0][1], atol=2e-5)
        for name, expected in results[0][2].items():
            np.testing.assert_allclose(gradient[name], expected, atol=1e-5 * scale, err_msg=name)


def test_given_expert_routing_replaces_the_routers_choice_however_segments_are_packed(model_path, micro_batch):
    trainer, batch = started(model_path("qwen3_moe")), micro_batch()
    column = chosen_at_random(batch)
    replayed = replace(batch, routed_experts=column)
    free, obeyed = trainer.forward([batch])[0], trainer.forward([replayed])[0]
    assert np.abs(free - obeyed).max() > 0.01
    for segment in range(batch.num_segments):
        its = batch.segment_ids == segment
        alone = replace(micro_batch(select=[segment]), routed_experts=column[its])
        np.testing.assert_allclose(trainer.forward([alone])[0], obeyed[its], atol=2e-5)
    first = np.flatnonzero(batch.position_ids == 0)
    column = column.copy()
    column[first] = 3 - column[first]  # the rows of segments' first tokens have no meaning
    np.testing.assert_array_equal(trainer.forward([replace(batch, routed_experts=column)])[0], obeyed)


def test_shared_prompt_uses_the_routing_of_its_first_rollout(model_path, micro_batch):
    trainer, one = started(model_path("qwen3_moe")), micro_batch((9,), tempered=False)
    column = chosen_at_random(one)
    columns = {
        name: np.tile(getattr(one, name), 2)
        for name in ("token_ids", "position_ids", "loss_mask", "advantages", "weights")
    }
    columns |= {name: np.tile(getattr(one, name), 2) for name in ("behavior_logprobs", "temperatures")}
    twice = MicroBatch(**columns, segment_ids=np.repeat([0, 1], 9).astype(np.int32), num_segments=2)
    other = np.concatenate((column, np.where(one.loss_mask[:, None, None], column, 3 - column)))
    got = trainer.forward([replace(twice, routed_experts=other)])[0].reshape(2, 9)
    expected = trainer.forward([replace(one, routed_experts=column)])[0]
    np.testing.assert_allclose(got, [expected] * 2, atol=1e-5)


def test_routing_that_cannot_be_replayed_is_rejected(model_path, micro_batch):
    batch = micro_batch((4,))
    column = np.zeros((4, 2, 2), np.uint8)
    dense, critic = started(model_path("qwen3")), started(model_path("qwen3_moe"), head=Head.VALUE)
    for trainer in (dense, critic):
        with pytest.raises(BatchError, match="has no routers that replay them"):
            trainer.forward([replace(batch, routed_experts=column)])
    trainer = started(model_path("qwen3_moe"))
    for wrong, message in (
        (column[:, :1], r"= \(4, 2, 2\), got uint8 \(4, 1, 2\)"),
        (column.astype(np.uint16), "must be uint8"),
        (column.astype(np.int32), "must be uint8"),
        (column + np.uint8(4), r"must lie in 0\.\.3, got 4"),
    ):
        with pytest.raises(BatchError, match=message):
            trainer.backward([replace(batch, routed_experts=wrong)], OBJECTIVE)
