"""Gradient checkpointing changes neither results nor gradients, in any accepted family of models."""

import numpy as np
import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl.objective.presets import resolve
from tests.fakes.torch_trainers import gradients, started
from tests.families.zoo import packed, save
from trainer_contract.errors import SpecError

#: One family of each kind: a noisy router, dropout in an MLP, dropout in the layer itself, dropout modules.
_KINDS = ("phimoe", "seed_oss", "opt", "gpt2")
OBJECTIVE = resolve("pipelinerl")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in _KINDS else pytest.mark.slow) for each in packed("trains")]
)
def test_checkpointing_changes_neither_predictions_norgradients(name, tmp_path, micro_batch):
    path, batch = save(tmp_path / name, name, noise=0.3), micro_batch()
    plain, frugal = (started(path, gradient_checkpointing=each) for each in (False, True))
    expected = plain.forward([batch])[0]
    for _ in range(2):
        np.testing.assert_array_equal(frugal.forward([batch])[0], expected)
    losses = [trainer.backward([batch], OBJECTIVE)[0].loss for trainer in (plain, frugal)]
    assert losses[0] == losses[1]
    got = gradients(frugal)
    assert got.keys() == gradients(plain).keys()
    for parameter, gradient in gradients(plain).items():
        torch.testing.assert_close(got[parameter], gradient, rtol=1e-5, atol=1e-7, msg=parameter)


@pytest.mark.parametrize(("recomputes", "times"), [(False, 1), (True, 2)])
def test_backward_runs_each_layer_again_only_with_checkpointing(recomputes, times, model_path, micro_batch):
    trainer, ran = started(model_path("qwen3"), gradient_checkpointing=recomputes), list[str]()
    for name, module in trainer._worker.loaded.model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.self_attn.register_forward_hook(lambda *_, name=name: ran.append(name))
    trainer.backward([micro_batch()], OBJECTIVE)
    assert len(ran) == times * 2 and len(set(ran)) == 2


def test_checkpointing_is_rejected_for_a_model_without_layers_that_can_be_recomputed(model_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.trainers.torch.packed_model.GradientCheckpointingLayer", int)
    with pytest.raises(SpecError, match=r"has no layers that .* set trainer\.gradient_checkpointing=false"):
        started(model_path("qwen3"), gradient_checkpointing=True)
