"""Model weights with a NaN or an infinite value are rejected, in every dtype and by all code that reads weights."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pipelinerl.config.recipe import MODELS
from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import check_values, load_model, load_structure
from pipelinerl.models.directory_files import refuse_not_finite
from pipelinerl.models.weight_reader import WeightReader

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_nan_and_infinity_in_weights_are_detected_and_finite_values_of_every_exponent_are_accepted(dtype):
    """Try all values of 16-bit dtypes; in longer dtypes, all values of the upper 16 bits, with the last bit 0 and 1."""
    width = torch.empty(0, dtype=dtype).element_size()
    upper = np.arange(2**16, dtype=f"u{width}") << 8 * width - 16
    words = np.concatenate([upper, upper | np.ones(1, upper.dtype)])
    finite = torch.from_numpy(words.view(f"i{width}")).view(dtype).isfinite().numpy()
    name = str(dtype).removeprefix("torch.")
    refuse_not_finite(Path("m"), "w", words[finite], name)
    for each in words[~finite]:
        with pytest.raises(ModelError, match="m: the parameter w holds NaN or infinite values"):
            refuse_not_finite(Path("m"), "w", np.array([words[0], each]), name)


def spoilt(path, value, dtype):
    """Return a copy of the shipped model with `value` as the last value of one parameter."""
    shutil.copytree(MODELS / "tiny_speller", path)
    weights = {name: values.to(dtype) for name, values in load_file(path / "model.safetensors").items()}
    weights[UP][-1, -1] = value
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def read_one_by_one(path):
    reader = WeightReader.of(path, load_structure(path))
    assert reader is not None
    return reader.rows(UP, slice(0, 10**6))


def read_by_jax(path):
    from jax.sharding import SingleDeviceSharding

    from pipelinerl.models.decoder_config import read_config
    from pipelinerl.plugins.jax.decoder import load_weights

    jax = pytest.importorskip("jax")
    return load_weights(path, read_config(path), place=lambda _: SingleDeviceSharding(jax.devices()[0]))


@pytest.mark.parametrize(
    "read", [lambda path: check_values(path, most_bytes=2**30), load_model, read_one_by_one, read_by_jax]
)
@pytest.mark.parametrize(
    ("value", "dtype"), [(float("nan"), torch.bfloat16), (-float("inf"), torch.float16), (float("inf"), torch.float32)]
)
def test_every_way_to_read_weights_names_the_parameter_that_contains_nan_or_infinity(tmp_path, read, value, dtype):
    path = spoilt(tmp_path / "model", value, dtype)
    with pytest.raises(ModelError, match=f"{path}: the parameter {UP} holds NaN or infinite values") as refused:
        read(path)
    assert "\n" not in str(refused.value)


def test_large_model_is_checked_for_nan_only_in_part_and_the_unchecked_bytes_are_counted(tmp_path):
    path = spoilt(tmp_path / "model", float("nan"), torch.float32)
    size = sum(each.numel() * 4 for each in load_file(path / "model.safetensors").values())
    assert check_values(path, most_bytes=0) == size
    assert check_values(MODELS / "tiny_speller", most_bytes=2**30) == 0
