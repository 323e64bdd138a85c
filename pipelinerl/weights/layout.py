"""Byte offsets of a layout's parameters, and names of buckets for error messages."""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

from inference_contract.weights import DType, ParameterSpec, WeightLayout

#: Dtypes that engines convert into one another.
_FLOATS: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def converted_by(layout: WeightLayout) -> tuple[DType, ...]:
    """Return the dtypes that an engine that keeps its weights as `layout` also accepts; see `torch_conversion`."""
    return _FLOATS if all(parameter.dtype in _FLOATS for parameter in layout.parameters) else ()


def parameters_in(layout: WeightLayout, start: int, end: int) -> list[tuple[ParameterSpec, int]]:
    """Return the parameters whose bytes begin in [start, end), each with the offset of its first byte."""
    begins = (0, *layout.ends[:-1])
    first, last = bisect_left(begins, start), bisect_left(begins, end)
    return list(zip(layout.parameters[first:last], begins[first:last], strict=True))


def describe_bucket(layout: WeightLayout, bucket: int, bounds: list[tuple[int, int]]) -> str:
    """Return the name of a bucket for error messages: `bucket 3 of 12 (parameters 'a' to 'b')`."""
    names = [parameter.name for parameter, _ in parameters_in(layout, *bounds[bucket])]
    span = f"parameter {names[0]!r}" if len(names) == 1 else f"parameters {names[0]!r} to {names[-1]!r}"
    return f"bucket {bucket + 1} of {len(bounds)} ({span})"
