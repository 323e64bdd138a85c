"""Copies of quantised directories in bf16, compared with the values that the tests quantised."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, save_file

from pipelinerl.errors import ModelError
from pipelinerl.models.checkpoint import check_weights, load_model, stored_tensors
from pipelinerl.models.model_shape import read_shape
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.dequantise.torch_copies import cache_folder, dequantise, outline, plain_directory
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.roles.dtypes import plain_model
from tests.families import zoo

#: The values of the 4 bits of MXFP4 (OCP Microscaling Formats 1.0, 5.3.3): sign, two bits of exponent, one of mantissa.
FP4 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
FP4 += [-each for each in FP4]


def quantised(path, name, method, quantise):
    """Write a family's model with those tensors replaced that `quantise` knows; return the decoded tensors by name."""
    zoo.save(path, name)
    raw = char_tokenizer()
    ChatTokenizer(raw, {raw.eos_token_id}).save(path)
    stored, decoded = {}, {}
    for key, values in load((path / "model.safetensors").read_bytes()).items():
        parts, decoded[key] = quantise(key, values) or ({key: values}, values)
        stored |= parts
    save_file({key: each.contiguous() for key, each in stored.items()}, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))
    return decoded


def linear(quantise):
    return lambda key, values: quantise(key, values) if key.endswith("_proj.weight") else None


def drawn(high, *shape, seed=0):
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def pack(codes, bits):
    """Pack i64 codes [rows, n] into i32 words [rows, n · bits / 32], lowest bits first."""
    words = codes.view(len(codes), -1, 32 // bits) << torch.arange(0, 32, bits)
    return words.sum(-1).to(torch.int64).to(torch.uint32).view(torch.int32)


def nibbles(codes, *, high_first=False):
    """Pack codes of 4 bits [.., n] into bytes [.., n / 2]."""
    first, second = codes[..., ::2], codes[..., 1::2]
    return (16 * first + second if high_first else first + 16 * second).to(torch.uint8)


@linear
def fp8(key, values):
    """Blocks of 24 × 20 values share a scale; the last ones are incomplete."""
    rows, columns = -(-values.shape[0] // 24), -(-values.shape[1] // 20)
    scales = torch.rand(rows, columns, generator=torch.Generator().manual_seed(rows)) / 100 + 1e-3
    spread = scales.repeat_interleave(24, 0)[: values.shape[0]].repeat_interleave(20, 1)[:, : values.shape[1]]
    kept = (values / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
    return {key: kept, f"{key}_scale_inv": scales}, kept.float() * spread


@linear
def fp8_of_tensors(key, values):
    kept = (values * 100).to(torch.float8_e4m3fn)
    scales = {f"{key}_scale_inv": torch.tensor(0.01), key.replace("weight", "activation_scale"): torch.tensor(3.0)}
    return {key: kept} | scales, kept.float() * 0.01


@linear
def fp8_of_rows(key, values):
    scale = values.abs().amax(1, keepdim=True) / 448
    kept = (values / scale).to(torch.float8_e4m3fn)
    return {key: kept, f"{key}_scale": scale.bfloat16()}, kept.float() * scale.bfloat16().float()


def mxfp4(key, values):
    """Draw random codes for the experts; a byte holds two, and a scale is the exponent of 32 values."""
    if not key.endswith((".gate_up_proj", ".down_proj")):
        return None
    experts, rows, columns = values.shape
    codes, scales = drawn(16, experts, columns, rows // 32, 32), drawn(5, experts, columns, rows // 32) + 119
    real = torch.tensor(FP4)[codes] * 2.0 ** (scales[..., None] - 127)
    parts = {f"{key}_blocks": nibbles(codes), f"{key}_scales": scales.to(torch.uint8)}
    return parts, real.flatten(2).transpose(1, 2)


@linear
def nvfp4(key, values):
    rows, columns = values.shape
    codes, scales = drawn(16, rows, columns), (drawn(64, rows, columns // 16) + 1).to(torch.float8_e4m3fn)
    parts = {key: nibbles(codes), f"{key}_scale": scales, f"{key}_scale_2": torch.tensor(1e-3)}
    return parts, torch.tensor(FP4)[codes] * scales.float().repeat_interleave(16, 1) * 1e-3


@linear
def nvfp4_of_vllm(key, values):
    rows, columns = values.shape
    codes, scales = drawn(16, rows, columns), (drawn(64, rows, columns // 16) + 1).to(torch.float8_e4m3fn)
    parts = {f"{key}_packed": nibbles(codes), f"{key}_scale": scales, f"{key}_global_scale": torch.tensor([1000.0])}
    return parts, torch.tensor(FP4)[codes] * scales.float().repeat_interleave(16, 1) / 1000


def groupwise(values, *, most, symmetric=False):
    """Return codes, zero points and scales of W' [in, out] for groups of 16 rows, and the decoded W."""
    rows, columns = values.T.shape
    codes, zeros = drawn(most, rows, columns), drawn(most - 1, rows // 16, columns, seed=1) + 1
    zeros = torch.full_like(zeros, most // 2) if symmetric else zeros
    scales = (torch.rand(rows // 16, columns, generator=torch.Generator().manual_seed(rows)) / 50).half()
    return codes, zeros, scales


def gptq(bits, offset=1, *, order=None):
    @linear
    def quantise(key, values):
        codes, zeros, scales = groupwise(values, most=2**bits)
        groups = torch.arange(len(codes)) // 16 if order is None else drawn(len(scales), len(codes), seed=order)
        stem = key.removesuffix("weight")
        parts = {f"{stem}qweight": pack(codes.T.contiguous(), bits).T, f"{stem}qzeros": pack(zeros - offset, bits)}
        parts |= {f"{stem}scales": scales, f"{stem}g_idx": groups.int()}
        return parts, ((codes - zeros[groups]) * scales.float()[groups]).T

    return quantise


@linear
def awq(key, values):
    codes, zeros, scales = groupwise(values, most=16)
    stem, order = key.removesuffix("weight"), torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

    def packed(each):
        return pack(each.view(len(each), -1, 8)[:, :, order].flatten(1), 4)

    parts = {f"{stem}qweight": packed(codes), f"{stem}qzeros": packed(zeros), f"{stem}scales": scales}
    return parts, ((codes - zeros.repeat_interleave(16, 0)) * scales.float().repeat_interleave(16, 0)).T


def bitsandbytes(nested):
    @linear
    def quantise(key, values):
        table, codes = torch.linspace(-1, 1, 16), drawn(16, values.numel())
        blocks = -(-len(codes) // 64)
        absmax = torch.rand(blocks, generator=torch.Generator().manual_seed(blocks))
        state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(values.shape)}
        parts = {key: nibbles(codes, high_first=True)[:, None], f"{key}.quant_map": table, f"{key}.absmax": absmax}
        if nested:
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.25}
            of_scales, sizes, kept = torch.linspace(-1, 1, 256), torch.rand(-(-blocks // 256)), drawn(256, blocks)
            absmax = of_scales[kept] * sizes.repeat_interleave(256)[:blocks] + 0.25
            parts |= {f"{key}.absmax": kept.to(torch.uint8), f"{key}.nested_absmax": sizes}
            parts |= {f"{key}.nested_quant_map": of_scales}
        text = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
        parts |= {f"{key}.quant_state.bitsandbytes__nf4": text}
        return parts, (table[codes] * absmax.repeat_interleave(64)[: len(codes)]).view(values.shape)

    return quantise


@linear
def int8_of_bitsandbytes(key, values):
    codes, scales = (drawn(255, *values.shape) - 127).to(torch.int8), torch.rand(len(values))
    stem = key.removesuffix("weight")
    parts = {key: codes, f"{stem}SCB": scales, f"{stem}weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, codes.float() * scales[:, None] / 127


def packed_of_vllm(symmetric):
    @linear
    def quantise(key, values):
        codes, zeros, scales = (each.T.contiguous() for each in groupwise(values, most=16, symmetric=symmetric))
        parts = {f"{key}_packed": pack(codes, 4), f"{key}_scale": scales.bfloat16()}
        parts |= {f"{key}_shape": torch.tensor(values.shape)}
        if not symmetric:
            parts |= {f"{key}_zero_point": pack(zeros.T.contiguous(), 4).T}
        spread = scales.bfloat16().float().repeat_interleave(16, 1)
        return parts, (codes - zeros.repeat_interleave(16, 1)) * spread

    return quantise


FORMATS = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [24, 20]}, fp8),
    "fp8 of whole tensors": ({"quant_method": "fp8"}, fp8_of_tensors),
    "fp8 of rows": ({"quant_method": "fbgemm_fp8"}, fp8_of_rows),
    "nvfp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, nvfp4),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 16}, gptq(4)),
    "gptq in 8 bits": ({"quant_method": "gptq", "bits": 8, "group_size": 16}, gptq(8)),
    "gptq in any order": ({"quant_method": "gptq", "bits": 4, "desc_act": True}, gptq(4, order=1)),
    "gptq v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, gptq(4, offset=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes(False)),
    "bitsandbytes, nested": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bitsandbytes(True)),
    "bitsandbytes int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_of_bitsandbytes),
    "vLLM's fp8": ({"quant_method": "compressed-tensors", "format": "float-quantized"}, fp8_of_rows),
    "vLLM's int4": ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, packed_of_vllm(True)),
    "vLLM's int4, asymmetric": ({"quant_method": "compressed-tensors"}, packed_of_vllm(False)),
    "vLLM's nvfp4": ({"quant_method": "compressed-tensors"}, nvfp4_of_vllm),
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(zoo._SIZES, "intermediate_size", 64)  # MXFP4 has one scale for 32 values


@pytest.mark.parametrize("name", [*FORMATS, "mxfp4"])
def test_copy_has_the_decoded_weights_in_bf16_and_its_outline_has_their_shapes(name, tmp_path):
    source, target, shapes = tmp_path / "quantised", tmp_path / "copy", tmp_path / "shapes"
    if name == "mxfp4":
        decoded = quantised(source, "gpt_oss", {"quant_method": "mxfp4"}, mxfp4)
    else:
        decoded = quantised(source, "qwen3", *FORMATS[name])
    dequantise(source, target)
    weights = load_model(target).state_dict()
    assert weights.keys() == decoded.keys()
    for key, values in decoded.items():
        assert torch.equal(weights[key].bfloat16(), values.bfloat16()), key
    assert "quantization_config" not in json.loads((target / "config.json").read_text())
    shapes.mkdir()
    assert outline(source, shapes) == sum(each.size for each in stored_tensors(target / "model.safetensors").values())
    assert read_shape(shapes) == read_shape(target)
    check_weights(shapes)
    assert (shapes / "model.safetensors").stat().st_blocks * 512 < 2**16


def test_large_copy_is_divided_into_files(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelinerl.plugins.dequantise.torch_copies._FILE_BYTES", 2**13)
    decoded = quantised(tmp_path / "quantised", "qwen3", *FORMATS["gptq"])
    dequantise(tmp_path / "quantised", tmp_path / "copy")
    assert len(list((tmp_path / "copy").glob("*.safetensors"))) > 2
    weights = load_model(tmp_path / "copy").state_dict()
    assert all(torch.equal(weights[key].bfloat16(), values.bfloat16()) for key, values in decoded.items())


#: Prints where the plain copy of a directory lies.
PROGRAM = """
import sys
from pathlib import Path
from pipelinerl.plugins.dequantise.torch_copies import plain_directory
print(plain_directory(Path(sys.argv[1])))
"""


def test_processes_share_one_copy_which_follows_its_source(tmp_path, capfd):
    source = tmp_path / "model"
    quantised(source, "qwen3", *FORMATS["fp8"])
    others = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, source], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    places = {other.communicate()[0].strip() for other in others}
    (place,) = places
    assert capfd.readouterr().err.count("was written to") == 1
    assert place.endswith("/model") and plain_directory(source) == type(source)(place)
    os.utime(source / "model.safetensors")  # the same content, so the same copy
    assert plain_directory(source) == type(source)(place)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    assert (plain_directory(source) / "chat_template.jinja").read_text() == "{{ messages }}"
    assert len([each for each in cache_folder().iterdir() if each.name != "digests"]) == 2
    plain = zoo.save(tmp_path / "plain", "qwen3")
    assert plain_model(plain) == plain and plain_model(tmp_path / "absent") == tmp_path / "absent"
    assert plain_model(source) == plain_directory(source)


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        ({"quant_method": "quip"}, r"quantised \(quip\), and only fp8, .* can be decoded; use the model from which"),
        ({"quant_method": "gptq", "bits": 3}, "weights in 3 bits cannot be decoded here, only in 2, 4 or 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version gemv packs weights in an order"),
        ({"quant_method": "mxfp4"}, r"_proj.weight in float8_e4m3fn without the scales that mxfp4 has"),
    ],
)
def test_directory_that_cannot_be_decoded_is_rejected_by_name(method, sentence, tmp_path):
    source = tmp_path / "model"
    quantised(source, "qwen3", method, fp8)
    with pytest.raises(ModelError, match=sentence):
        dequantise(source, tmp_path / "copy")


def test_directories_that_need_no_copy_or_lack_a_part_are_rejected(tmp_path, monkeypatch):
    source = tmp_path / "model"
    quantised(source, "qwen3", *FORMATS["gptq"])
    with pytest.raises(ModelError, match=f"pipelinerl dequantise {source} {source}-bf16"):
        load_model(source)
    stored = load((source / "model.safetensors").read_bytes())
    absent = next(key for key in stored if key.endswith(".scales"))
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda place: SimpleNamespace(free=7))
        with pytest.raises(ModelError, match=r"takes 0.00 GiB, and 0.00 GiB are free .* set XDG_CACHE_HOME"):
            dequantise(source, tmp_path / "copy")
    save_file({key: each for key, each in stored.items() if key != absent}, source / "model.safetensors")
    with pytest.raises(ModelError, match=f"lacks {absent}, without which it cannot be decoded"):
        dequantise(source, tmp_path / "copy")
    with pytest.raises(ModelError, match="is not quantised; use it as it is"):
        plain = zoo.save(tmp_path / "plain", "qwen3")
        (plain / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
        dequantise(plain, tmp_path / "copy")
