"""`SharedBase`: the frozen weights of a model directory, once per process and device.

The policy, a critic and a reference that begin from one directory compute with one copy of it: each has a model of its
own, whose frozen parameters are views of the same memory. Promise: whoever takes them up never writes to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from pipelinerl.trainers.torch.packed_model import hold


@final
@dataclass(slots=True, weakref_slot=True)
class SharedBase:
    """Held by each who computes with it; the last one that is dropped frees it."""

    weights: dict[str, Tensor]

    def take_up(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Give what is not here yet, once it is on the device; take what is."""
        for name, parameter in parameters.items():
            parameter.data = self.weights.setdefault(name, parameter.data)


_BASES: Final[WeakValueDictionary[tuple[str, ...], SharedBase]] = WeakValueDictionary()


def shared(parameters: Mapping[str, nn.Parameter], *, digest: str, device: torch.device) -> SharedBase:
    """The base from the directory with this digest; what of it is on the device takes the parameters' place there.

    Args:
        parameters: by the names that they have in the layers alone, without what is before these in a language model.
    """
    dtypes = {str(parameter.dtype) for parameter in parameters.values()}
    base = _BASES.setdefault((digest, str(device), *sorted(dtypes)), SharedBase({}))
    for name, parameter in parameters.items():
        if (own := base.weights.get(name)) is not None and own.dtype == parameter.dtype:
            hold(parameter, own)
    return base
