"""Conversion of weights between dtypes: every pair against torch's own cast, per parameter and unaligned."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from inference_contract.errors import OutOfRange
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl import rng
from pipelinerl.weights import torch_conversion
from pipelinerl.weights.layout import converted_by
from pipelinerl.weights.torch_conversion import convert

FLOATS = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def layout(*dtypes: DType, sizes: tuple[int, ...] = (7, 12, 5)) -> WeightLayout:
    """Return parameters of odd sizes, so that some of a mixed layout are not aligned to their element size."""
    return WeightLayout(
        parameters=tuple(
            ParameterSpec(name=f"p{row}", shape=(size,), dtype=dtype)
            for row, (size, dtype) in enumerate(zip(sizes, dtypes, strict=True))
        )
    )


def values(wire: WeightLayout) -> list[torch.Tensor]:
    made = []
    for row, spec in enumerate(wire.parameters):
        drawn = rng.generator(row, "values").normal(size=spec.shape).astype(np.float32)
        made.append(torch.from_numpy(drawn).to(getattr(torch, spec.dtype.value)))
    return made


def in_bytes(tensors: list[torch.Tensor]) -> np.ndarray:
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors]).numpy()


@pytest.mark.parametrize("kept", list(itertools.product(FLOATS, repeat=3))[::4])
@pytest.mark.parametrize("sent", list(itertools.product(FLOATS, repeat=3))[::5])
def test_each_parameter_is_rounded_to_nearest(sent: tuple[DType, ...], kept: tuple[DType, ...]) -> None:
    wire, ours = layout(*sent), layout(*kept)
    tensors = values(wire)
    into = np.zeros(ours.num_bytes, np.uint8)
    convert(in_bytes(tensors), wire, into=into, layout=ours)
    expected = [
        tensor.to(getattr(torch, spec.dtype.value)) for tensor, spec in zip(tensors, ours.parameters, strict=True)
    ]
    assert np.array_equal(into, in_bytes(expected))


def test_block_size_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    wire, ours = layout(*[DType.FLOAT32] * 3), layout(*[DType.BFLOAT16] * 3)
    whole, pieces = np.zeros(ours.num_bytes, np.uint8), np.zeros(ours.num_bytes, np.uint8)
    convert(in_bytes(values(wire)), wire, into=whole, layout=ours)
    monkeypatch.setattr(torch_conversion, "_BLOCK", 5)
    convert(in_bytes(values(wire)), wire, into=pieces, layout=ours)
    assert np.array_equal(whole, pieces) and whole.any()


def test_value_beyond_float16_is_rejected_and_infinity_is_kept() -> None:
    wire, ours = layout(DType.BFLOAT16, sizes=(3,)), layout(DType.FLOAT16, sizes=(3,))
    into = np.zeros(ours.num_bytes, np.uint8)
    sent = [torch.tensor([1.0, -70000.0, float("inf")], dtype=torch.bfloat16)]
    with pytest.raises(OutOfRange, match=r"parameter 'p0' holds 7\.\d+e\+04, beyond the 65504 of float16"):
        convert(in_bytes(sent), wire, into=into, layout=ours)
    convert(in_bytes([torch.tensor([1.0, 2.0, float("inf")], dtype=torch.bfloat16)]), wire, into=into, layout=ours)
    assert torch.from_numpy(into).view(torch.float16).tolist() == [1.0, 2.0, float("inf")]


def test_only_floating_layouts_are_converted() -> None:
    assert converted_by(layout(*FLOATS)) == FLOATS
    assert converted_by(layout(DType.FLOAT32, DType.INT8, DType.FLOAT32)) == ()
