"""Recipe defaults that depend on the machine's memory, disk and accelerator are computed and recorded at the start."""

import pytest

from pipelinerl.config.recipe import load
from pipelinerl.plugins.memory import disk
from pipelinerl.plugins.memory.prediction import predict
from pipelinerl.roles import dtypes
from pipelinerl.roles.dtypes import settled
from pipelinerl.roles.wiring import objective_of
from pipelinerl.system.machine import has_accelerator
from tests.roles.test_dtypes import directory

GIB = 2**30


def recipe(*overrides):
    return load("tiny", ["trainer.micro_batch_tokens=auto", "engine.context_length=64", *overrides])


def test_default_micro_batch_size_is_the_largest_that_fits_into_memory():
    config = recipe()
    whole = settled(config, {"all": 64 * GIB})
    assert whole.trainer.micro_batch_tokens == 16384
    needed = predict(whole, objective_of(config)).by_process
    limit = sum(each.total for each in needed.values())
    smaller = settled(config, {"all": limit})
    assert smaller.trainer.micro_batch_tokens in (1024, 2048, 4096, 8192)
    assert settled(smaller, {"all": 64 * GIB}) == smaller, "what is recorded stays"


@pytest.mark.parametrize(
    ("device", "here", "dtype"), [("cpu", True, "float32"), ("auto", False, "float32"), ("auto", True, "auto")]
)
def test_engines_of_a_half_precision_model_use_float32_on_a_cpu(tmp_path, monkeypatch, device, here, dtype):
    import torch

    monkeypatch.setattr(dtypes, "has_accelerator", lambda: here)
    model = directory(tmp_path / "model", torch.bfloat16)
    assert settled(recipe(f"model.path={model}", f"engine.device={device}")).engine.dtype == dtype
    given = settled(recipe(f"model.path={model}", "engine.dtype=bfloat16"))
    assert given.engine.dtype == "bfloat16", "the recipe's own word counts"


@pytest.mark.parametrize(
    ("device", "here", "dtype", "precision"),
    [("cpu", True, "bfloat16", "fp32"), ("auto", False, "bfloat16", "fp32"), ("auto", True, "bfloat16", "bf16"),
     ("cuda", False, "bfloat16", "bf16"), ("auto", True, "float32", "fp32")],
)  # fmt: skip
def test_trainer_of_a_bfloat16_model_computes_in_bf16_on_an_accelerator(
    tmp_path, monkeypatch, device, here, dtype, precision
):
    import torch

    monkeypatch.setattr(dtypes, "has_accelerator", lambda: here)
    config = recipe(f"model.path={directory(tmp_path / 'model', getattr(torch, dtype))}", f"trainer.device={device}")
    assert config.trainer.precision == "auto" and settled(config).trainer.passes_in == precision
    given = settled(config.model_copy(update={"trainer": config.trainer.model_copy(update={"precision": "fp32"})}))
    assert given.trainer.passes_in == "fp32", "the recipe's own word counts"


def test_accelerator_is_detected_by_its_device_file_unless_cuda_visible_devices_is_empty(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not has_accelerator(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / "nvidia0").touch()
    assert has_accelerator(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not has_accelerator(tmp_path)


def test_run_whose_checkpoints_do_not_fit_on_the_disk_is_rejected(tmp_path, monkeypatch):
    config = recipe(f"run.directory={tmp_path}", "checkpoint.keep=50", "samples.log=off", "checkpoint.interval_steps=1")
    predicted = predict(config, objective_of(config))
    assert not [need for need in disk.needs(config, {}) if need.lacking]
    each = disk.checkpoint_bytes(config, predicted)
    monkeypatch.setattr(disk, "free_bytes", lambda _: 256 * 2**20 + 10 * each)
    *_, lacking = disk.needs(config, {})
    assert lacking.lacking and "checkpoint.keep=1 checkpoint.keep_best=0" in lacking.text
    assert "50 checkpoints of" in disk.disk_line(config, predicted)


def test_disk_space_that_a_resumed_run_already_uses_is_not_required_again(tmp_path, monkeypatch):
    config = load("tiny", [f"run.directory={tmp_path}", "checkpoint.keep=50"])
    predicted = predict(config, objective_of(config))
    needed = disk.run_bytes(config, predicted)
    monkeypatch.setattr(disk, "free_bytes", lambda _: needed - 1000)
    place = tmp_path / "elsewhere"
    place.mkdir()
    (sentence,) = disk.disk_faults(config, predicted, place)
    assert "checkpoint.keep=1" in sentence
    (place / "weights").write_bytes(b"0" * 1000)
    assert not [*disk.disk_faults(config, predicted, place)]
