"""Tests of compiled against uncompiled layers, also with checkpointing, adapters, and master weights on the host."""

import numpy as np
import pytest

from pipelinerl.objective.presets import resolve
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.errors import SpecError
from trainer_contract.types import Device, Precision, TrainerSpec

DEVICES = [pytest.param(Device.CPU, marks=pytest.mark.slow), pytest.param(Device.CUDA, marks=pytest.mark.gpu)]
KINDS = {
    "whole": {},
    "checkpoints": {"gradient_checkpointing": True},
    "adapters": {"options": {"lora": {"rank": 4}}},
    "masters on the host": {"options": {"optimizer": {"place": "host"}}},
}


def measured(path, batch, *, compiled, device, precision=Precision.BF16, options=(), **fields):
    """Return the log-probs of a batch, and those after a step."""
    trainer = TorchTrainer()
    options = dict(options) | {"compile": compiled}
    trainer.init_worker(TrainerSpec(model_path=path, device=device, precision=precision, options=options, **fields))
    before = trainer.forward([batch])[0]
    trainer.backward([batch], resolve("pipelinerl"))
    trainer.optimizer_step(learning_rate=1e-3)
    after = trainer.forward([batch])[0]
    trainer.close()
    return np.stack((before, after))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")  # warnings of torch's own compiler
def test_compiled_layers_are_as_exact_as_uncompiled_layers(kind, device, model_path, micro_batch):
    """Compiled and uncompiled layers differ by less than bf16 differs from fp32, before and after a step."""
    batch, path, fields = micro_batch(), model_path("qwen3"), KINDS[kind]
    plain, compiled = (measured(path, batch, compiled=each, device=device, **fields) for each in (False, True))
    if kind == "masters on the host":
        fields = {}
    exact = measured(path, batch, compiled=False, device=device, precision=Precision.FP32, **fields)
    assert np.abs(compiled - plain).mean() <= np.abs(plain - exact).mean()
    assert np.abs(compiled - exact).mean() <= 1.2 * np.abs(plain - exact).mean()


@pytest.mark.parametrize(
    ("options", "message"), [({"compile": "yes"}, "true or false"), ({"compile": True, "mesh": {"dp_shard": 2}}, "one")]
)
def test_invalid_compile_options_are_rejected(options, message, model_path):
    spec = TrainerSpec(model_path=model_path("qwen3"), device=Device.CPU, options=options)
    with pytest.raises(SpecError, match=message):
        TorchTrainer().init_worker(spec)
