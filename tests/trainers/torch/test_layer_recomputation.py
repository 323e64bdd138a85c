"""Gradient checkpointing changes neither results nor gradients, in any accepted family of models."""

import numpy as np
import pytest
import torch
from transformers.modeling_layers import GradientCheckpointingLayer

from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.families.zoo import packed, save
from trainer_contract.errors import SpecError
from trainer_contract.types import Device, TrainerSpec

#: One family of each kind: a noisy router, dropout in an MLP, dropout in the layer itself, dropout modules.
_KINDS = ("phimoe", "seed_oss", "opt", "gpt2")
OBJECTIVE = resolve("pipelinerl")


def _trainer(path, *, recomputes):
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, gradient_checkpointing=recomputes))
    return trainer


def _gradients(trainer):
    weights = trainer._worker.loaded.weights
    return {name: each.grad for name, each in weights.items() if each.grad is not None}


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in _KINDS else pytest.mark.slow) for each in packed("trains")]
)
def test_checkpointing_changes_neither_predictions_nor_gradients(name, tmp_path, micro_batch):
    path, batch = save(tmp_path / name, name, noise=0.3), micro_batch()
    plain, frugal = (_trainer(path, recomputes=each) for each in (False, True))
    expected = plain.forward([batch])[0]
    for _ in range(2):
        np.testing.assert_array_equal(frugal.forward([batch])[0], expected)
    losses = [trainer.backward([batch], OBJECTIVE)[0].loss for trainer in (plain, frugal)]
    assert losses[0] == losses[1]
    gradients = _gradients(frugal)
    assert gradients.keys() == _gradients(plain).keys()
    for parameter, gradient in _gradients(plain).items():
        torch.testing.assert_close(gradients[parameter], gradient, rtol=1e-5, atol=1e-7, msg=parameter)


@pytest.mark.parametrize(("recomputes", "times"), [(False, 1), (True, 2)])
def test_backward_runs_each_layer_again_only_with_checkpointing(recomputes, times, model_path, micro_batch):
    trainer, ran = _trainer(model_path("qwen3"), recomputes=recomputes), list[str]()
    for name, module in trainer._worker.loaded.model.named_modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.self_attn.register_forward_hook(lambda *_, name=name: ran.append(name))
    trainer.backward([micro_batch()], OBJECTIVE)
    assert len(ran) == times * 2 and len(set(ran)) == 2


def test_checkpointing_is_rejected_for_a_model_without_layers_that_can_be_recomputed(model_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.trainers.torch.packed_model.GradientCheckpointingLayer", int)
    with pytest.raises(SpecError, match=r"has no layers that .* set trainer\.gradient_checkpointing=false"):
        _trainer(model_path("qwen3"), recomputes=True)
