"""Conversion of a trainer's parameters to a layout."""

from __future__ import annotations

import pytest

from inference_contract.weights import DType
from pipelinerl.errors import UpdateError
from pipelinerl.weights.layout import describe_bucket, parameters_in
from pipelinerl.weights.publisher import wire_layout
from trainer_contract.types import ParameterInfo

INFOS = (
    ParameterInfo("a", (2, 3), "float32"),
    ParameterInfo("b", (4,), "bfloat16"),
    ParameterInfo("c", (), "float64"),
)


def test_order_shape_and_dtype_are_kept() -> None:
    layout = wire_layout(INFOS)
    assert [(p.name, p.shape, p.dtype) for p in layout.parameters] == [
        ("a", (2, 3), DType.FLOAT32),
        ("b", (4,), DType.BFLOAT16),
        ("c", (), DType.FLOAT64),
    ]
    assert layout.num_bytes == 24 + 8 + 8


def test_unsupported_dtype_is_named() -> None:
    with pytest.raises(UpdateError, match=r"parameter 'd' must have one of the dtypes .* got 'int64'"):
        wire_layout([ParameterInfo("d", (1,), "int64")])


def test_parameters_are_found_by_their_first_byte() -> None:
    layout = wire_layout(INFOS)
    assert [(p.name, offset) for p, offset in parameters_in(layout, 24, 40)] == [("b", 24), ("c", 32)]


def test_bucket_is_named_by_its_parameters() -> None:
    layout = wire_layout(INFOS)
    bounds = layout.buckets(24)
    assert describe_bucket(layout, 0, bounds) == "bucket 1 of 2 (parameter 'a')"
    assert describe_bucket(layout, 1, bounds) == "bucket 2 of 2 (parameters 'b' to 'c')"
