"""Copies of weights in host memory, as bytes (numpy has no bfloat16), and a check that weights fit a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_contract.errors import StateError
from trainer_contract.types import HostWeights, ParameterInfo


def copied(weights: Iterable[tuple[str, Any]]) -> HostWeights:
    """Copy the output of `Trainer.gather_weights`; the copy shares no memory with the trainer."""
    return {name: np.array(bytes_of(array)) for name, array in weights}


def check_weights(weights: HostWeights, layout: Sequence[ParameterInfo]) -> None:
    """Raise StateError unless the weights are exactly the layout's parameters, each with the right number of bytes."""
    for info in layout:
        if info.name not in weights:
            raise StateError(f"the given weights lack the parameter {info.name!r}; they belong to another model")
        expected, got = num_bytes(info), weights[info.name].nbytes
        if got != expected:
            raise StateError(
                f"the parameter {info.name!r} given must have {expected} bytes, {info.dtype} {list(info.shape)}, "
                f"got {got}; the weights belong to another model"
            )
    for name in weights.keys() - {info.name for info in layout}:
        raise StateError(
            f"the given weights contain {name!r}, which this model does not have; they belong to another model"
        )


def num_bytes(info: ParameterInfo) -> int:
    """Return the size in bytes of a whole parameter."""
    return prod(info.shape) * (2 if info.dtype == "bfloat16" else np.dtype(info.dtype).itemsize)


def bytes_of(array: Any) -> NDArray[np.uint8]:
    """Return the bytes, u8 [n], of a numpy array, torch tensor or DLPack array; arrays on the host are not copied."""
    if hasattr(array, "detach"):
        flat = array.detach().cpu().contiguous().flatten()
        return np.asarray(flat.view(dtype=flat.new_empty(0).byte().dtype).numpy())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
