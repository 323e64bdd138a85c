"""Copies of quantised directories in bf16, compared with weights decoded here."""

import json

import pytest
import torch
from safetensors.torch import load, save_file

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import load_model
from pipelinerl.models.tiny_decoder import char_tokenizer
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.torch_dequantise import dequantise
from tests.families import zoo

#: The values of the 4 bits of MXFP4 (OCP Microscaling Formats 1.0, 5.3.3): sign, two bits of exponent, one of mantissa.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def quantised(path, name, method, quantise):
    """Write a family's model with those tensors replaced that `quantise` knows; return the decoded tensors by name."""
    zoo.save(path, name)
    stored, decoded = {}, {}
    for key, values in load((path / "model.safetensors").read_bytes()).items():
        parts, decoded[key] = quantise(key, values) or ({key: values}, values)
        stored |= parts
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return decoded


def tokenizer():
    raw = char_tokenizer()
    return ChatTokenizer(raw, {raw.eos_token_id})


def fp8(key, values):
    if not key.endswith("_proj.weight"):
        return None
    scale = values.abs().max() / 448
    kept = (values / scale).to(torch.float8_e4m3fn)
    return {key: kept, f"{key}_scale_inv": scale.reshape(1, 1)}, kept.float() * scale


def mxfp4(key, values):
    """Draw random codes for the experts; a byte holds two, and a scale is the exponent of 32 values."""
    if not key.endswith((".gate_up_proj", ".down_proj")):
        return None
    experts, rows, columns = values.shape
    draw = torch.Generator().manual_seed(len(key))
    codes = torch.randint(0, 16, (experts, columns, rows // 32, 32), generator=draw)
    scales = torch.randint(119, 124, (experts, columns, rows // 32), generator=draw)
    blocks = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
    real = torch.tensor(FP4 + [-each for each in FP4])[codes] * 2.0 ** (scales[..., None] - 127)
    return {f"{key}_blocks": blocks, f"{key}_scales": scales.to(torch.uint8)}, real.flatten(2).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "method", "quantise"),
    [
        ("qwen3", {"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
        ("gpt_oss", {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4),
    ],
)
def test_copy_of_a_quantised_model_has_the_decoded_weights_in_bf16(name, method, quantise, tmp_path, monkeypatch):
    monkeypatch.setitem(zoo._SIZES, "intermediate_size", 64)  # MXFP4 has one scale for 32 values
    source = tmp_path / "quantised"
    decoded = quantised(source, name, method, quantise)
    tokenizer().save(source)
    with pytest.raises(ModelError, match=f"pipelinerl dequantise {source} {source}-bf16"):
        load_model(source)
    dequantise(source, tmp_path / "copy")
    weights = load_model(tmp_path / "copy").state_dict()
    assert any("proj" in key for key in decoded) and weights.keys() == decoded.keys()
    for key, values in decoded.items():
        assert torch.equal(weights[key].bfloat16(), values.bfloat16()), key


def test_directory_that_cannot_be_decoded_is_rejected_by_name(tmp_path):
    source = zoo.save(tmp_path / "awq", "qwen3")
    tokenizer().save(source)
    with pytest.raises(ModelError, match="is not quantised; use it as it is"):
        dequantise(source, tmp_path / "copy")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    with pytest.raises(ModelError, match=r"quantised \(awq\), which cannot be trained; use the model from which"):
        dequantise(source, tmp_path / "copy")
