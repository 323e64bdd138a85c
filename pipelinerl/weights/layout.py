"""The bytes of a weight update: where its parameters lie, how its buckets are named in errors, and its digest."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any, Final

import xxhash

from inference_contract.weights import DType, ParameterSpec, WeightLayout

#: Floating-point dtypes: an engine that keeps one of these accepts the others and converts them.
_FLOATS: Final = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def converted_by(layout: WeightLayout) -> tuple[DType, ...]:
    """Return the dtypes from which an engine can convert received weights to those of `layout`; () if none."""
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


#: Number of bytes hashed per call, which takes 70 µs at about 15 GB/s. A chunk of this size is large enough that
#: hashing releases the GIL, and small enough to be hashed quickly.
_CHUNK_BYTES: Final = 2**20


class WeightDigest:
    """Incremental digest of weights: the result is the same however the bytes are split among calls of `update`."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, data: Any) -> None:
        """Append bytes: a flat uint8 numpy array, a memoryview or a flat uint8 torch tensor on any device."""
        host = data.cpu().numpy() if hasattr(data, "cpu") else data  # tensors have `cpu`; arrays and memoryviews do not
        for start in range(0, len(host), _CHUNK_BYTES):
            self._state.update(host[start : start + _CHUNK_BYTES])

    def hexdigest(self) -> str:
        return self._state.hexdigest()
