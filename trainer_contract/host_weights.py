"""Weights in host memory: a copy of what a trainer gathers, as bytes, and the check that such a copy fits a model.

Bytes rather than arrays, since numpy has no bfloat16: so they are one kind for every backend, dtype and file, and who
keeps them needs no backend's library.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_contract.errors import StateError
from trainer_contract.types import HostWeights, ParameterInfo


def copied(weights: Iterable[tuple[str, Any]]) -> HostWeights:
    """A copy of what `Trainer.gather_weights` yields, which shares no memory with the trainer."""
    return {name: np.array(bytes_of(array)) for name, array in weights}


def check_weights(weights: HostWeights, layout: Sequence[ParameterInfo]) -> None:
    """Are these all parameters of the layout, and nothing else?

    Raises:
        StateError: naming the first that is missing, unknown or of another size.
    """
    for info in layout:
        if info.name not in weights:
            raise StateError(f"the weights given lack the parameter {info.name!r}; they are of another model")
        wanted, found = num_bytes(info), weights[info.name].nbytes
        if found != wanted:
            raise StateError(
                f"the parameter {info.name!r} given must have {wanted} bytes, {info.dtype} {list(info.shape)}, "
                f"got {found}; it is of another model"
            )
    for name in weights.keys() - {info.name for info in layout}:
        raise StateError(f"the weights given hold {name!r}, which this model does not have; they are of another model")


def num_bytes(info: ParameterInfo) -> int:
    """Return the size of a whole parameter."""
    return prod(info.shape) * (2 if info.dtype == "bfloat16" else np.dtype(info.dtype).itemsize)


def bytes_of(array: Any) -> NDArray[np.uint8]:
    """Flat bytes of a numpy array, a torch tensor on any device, or anything with DLPack; not copied on the host."""
    if hasattr(array, "detach"):
        flat = array.detach().cpu().contiguous().flatten()
        return np.asarray(flat.view(dtype=flat.new_empty(0).byte().dtype).numpy())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
