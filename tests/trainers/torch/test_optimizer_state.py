"""A trainer with optimizer state in bf16 or on the host, compared with the default."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pipelinerl.trainers.torch.trainer import TorchTrainer
from tests.fakes.torch_rank0 import batches, spec_of, steps
from trainer_contract.host_weights import copied
from trainer_contract.types import Precision, Rounding, WeightDType

HOST = {"optimizer": {"place": "host"}}
SMALL = {"optimizer": {"moments": "bf16"}}


def started(model, options, **fields):
    trainer = TorchTrainer()
    trainer.init_worker(spec_of(model, options, **fields))
    return trainer


def weights_of(trainer):
    return {name: each.clone() for name, each in trainer.gather_weights()}


def saved(trainer, path):
    path.mkdir()
    trainer.save_state(path)
    return path


def tensors_of(state):
    return load_file(state / "optimizer.safetensors") | load_file(state / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("name", "gathered", "rounding"),
    [
        ("llama", WeightDType.FLOAT32, Rounding.NEAREST),
        ("llama", WeightDType.BFLOAT16, Rounding.DITHERED),
        ("gpt2", WeightDType.BFLOAT16, Rounding.NEAREST),
        pytest.param("qwen2", WeightDType.BFLOAT16, Rounding.DITHERED, marks=pytest.mark.slow),
    ],
)
def test_fp32_master_weights_on_the_host_give_bit_identical_results(name, gathered, rounding, model_path, tmp_path):
    """In bf16, the device holds only bf16 copies of the weights of linear layers."""
    model = model_path(name)
    fields = {"precision": Precision.BF16, "gather_dtype": gathered, "rounding": rounding}
    whole, apart = (started(model, each, **fields) for each in ({}, HOST))
    masters = apart._worker.masters
    assert {apart._worker.trained[key].dtype for key in masters} == {torch.bfloat16}
    assert set(masters) < set(whole._worker.trained) and all(each.dtype is torch.float32 for each in masters.values())
    theirs = {key for key in whole._worker.trained if "proj" in key or ".c_" in key or "lm_head" in key}
    assert set(masters) == {key for key in theirs if key.endswith(".weight")}
    expected, actual = (steps(each, first=0, count=2, parts=2) for each in (whole, apart))
    for key, values in expected.items():
        np.testing.assert_array_equal(actual[key], values)
    for key, weight in whole.gather_weights():
        assert torch.equal(dict(apart.gather_weights())[key], weight), key
    held, own = copied(whole.gather_weights()), copied(apart.gather_weights())
    batch = batches(0, 2)[0]
    assert apart.forward_at([batch], own)[0].tobytes() == whole.forward_at([batch], held)[0].tobytes()
    state = saved(apart, tmp_path / "state")
    theirs_saved = tensors_of(saved(whole, tmp_path / "whole"))
    for key, tensor in tensors_of(state).items():
        assert torch.equal(tensor, theirs_saved[key]), key
    more = [
        steps(started(model, each, restore_from=state, **fields), first=2, count=1, parts=2)["losses"].item()
        for each in ({}, HOST)
    ]
    assert more == [steps(each, first=2, count=1, parts=2)["losses"].item() for each in (whole, apart)]


def test_bf16_moments_are_saved_unchanged_and_resume_bit_for_bit(model_path, tmp_path):
    model = model_path("qwen3")
    trainer = started(model, SMALL)
    steps(trainer, first=0, count=3, parts=2)
    state = saved(trainer, tmp_path / "state")
    kept = load_file(state / "optimizer.safetensors")
    assert {each.dtype for key, each in kept.items() if ".exp_avg" in key} == {torch.bfloat16}
    again = started(model, SMALL, restore_from=state)
    resaved = load_file(saved(again, tmp_path / "again") / "optimizer.safetensors")
    assert all(torch.equal(resaved[key], each) for key, each in kept.items())
    expected, actual = (steps(each, first=3, count=3, parts=2) for each in (trainer, again))
    for key, values in expected.items():
        np.testing.assert_array_equal(actual[key], values)
    for key, weight in weights_of(trainer).items():
        assert torch.equal(dict(again.gather_weights())[key], weight), key
    assert np.isfinite(steps(started(model, {}, restore_from=state), first=3, count=1, parts=2)["losses"]).all()


def test_losses_with_bf16_moments_stay_close_to_those_with_fp32_moments(model_path):
    exact, small = (steps(started(model_path("qwen3"), each), first=0, count=10, parts=1) for each in ({}, SMALL))
    moved = np.abs(exact["losses"] - exact["losses"][0]).max()
    assert 0 < np.abs(exact["losses"] - small["losses"]).max() < 0.05 * moved
