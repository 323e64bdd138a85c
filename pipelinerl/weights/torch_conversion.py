"""`convert`: from the dtypes in which weights are sent to those in which an engine keeps them (`layout.converted_by`).

Values are rounded to the nearest. Float16's largest value is 65,504. A finite value beyond it fails the update, because
an infinity would corrupt every sample.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch
from torch import Tensor

from inference_contract.errors import OutOfRange
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.weights.broadcast.collective import shared_tensor

#: Number of elements converted at once, so that temporaries stay small compared to the model.
_BLOCK: Final = 1 << 22


def convert(sent: Any, wire: WeightLayout, *, into: Any, layout: WeightLayout) -> None:
    """Fill `into` u8 [layout.num_bytes] with the values of `sent` u8 [wire.num_bytes]: the same parameters in order.

    Both are numpy, or torch on one device.

    Raises:
        OutOfRange: a finite value would become an infinity.
    """
    source, target = shared_tensor(sent), shared_tensor(into)
    for (sent_as, values), (kept, place) in zip(_parts(source, wire), _parts(target, layout), strict=True):
        if sent_as.dtype is kept.dtype:
            place.copy_(values)
            continue
        old, new = sent_as.dtype.itemsize, kept.dtype.itemsize
        for start in range(0, values.numel() // old, _BLOCK):
            block = _elements(values[start * old : (start + _BLOCK) * old], sent_as)
            made = block.to(getattr(torch, kept.dtype.value))
            if kept.dtype is DType.FLOAT16 and bool((made.isinf() & block.isfinite()).any()):
                largest = block[block.isfinite()].abs().max().item()
                raise OutOfRange(
                    f"parameter {kept.name!r} holds {largest:.4g}, beyond the 65504 of float16, in which this engine "
                    "keeps its weights; set engine.dtype=bfloat16 or float32"
                )
            place[start * new : start * new + made.numel() * new].copy_(made.view(torch.uint8))


def _parts(buffer: Tensor, layout: WeightLayout) -> Iterator[tuple[ParameterSpec, Tensor]]:
    """Yield each parameter with its bytes, a flat slice of `buffer`."""
    for spec, end in zip(layout.parameters, layout.ends, strict=True):
        yield spec, buffer[end - spec.num_bytes : end]


def _elements(part: Tensor, spec: ParameterSpec) -> Tensor:
    """View bytes as elements; in a layout of mixed dtypes, copy those that are not aligned to an element."""
    aligned = part if part.storage_offset() % spec.dtype.itemsize == 0 else part.clone()
    return aligned.view(getattr(torch, spec.dtype.value))
