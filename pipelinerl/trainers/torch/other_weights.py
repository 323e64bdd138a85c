"""Other weights in a torch model for a while: modules, wrappers, kernels and the trainer's state stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from trainer_contract.types import HostWeights


@contextmanager
def lent(parameters: Iterable[tuple[str, nn.Parameter]], weights: HostWeights, *, dtype: torch.dtype) -> Iterator[None]:
    """Each parameter holds the given values; afterwards, whatever happened, the storage that it held before.

    Gradients and optimizer state hang on the parameter, not on its storage, and are not seen here. Tied parameters are
    one parameter, so both ends change.

    Args:
        weights: bytes of every parameter, fitting.
        dtype: theirs.
    """
    own = {name: (parameter, parameter.data) for name, parameter in parameters}
    try:
        for name, (parameter, data) in own.items():
            given = torch.from_numpy(weights[name]).view(dtype).view(data.shape)
            parameter.data = given.to(device=data.device, dtype=data.dtype)
        yield
    finally:
        for parameter, data in own.values():
            parameter.data = data
