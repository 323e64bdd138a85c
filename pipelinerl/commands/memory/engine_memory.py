"""What an engine takes of a device's memory: weights, the buffer that the next version comes into, keys and values."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pipelinerl.models.model_shape import BYTES, ModelShape
from trainer_contract.types import WeightDType

#: Bits of a quantised weight, by the format's name; rows have scales besides, which are few.
_BITS: Final = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """An engine on `devices`; `slots` sequences of `context` tokens at once."""

    shape: ModelShape
    dtype: WeightDType
    wire: WeightDType
    slots: int
    context: int
    weights: str = "native"
    devices: int = 1

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes on each device, by what they are of."""
        shape, size = self.shape, BYTES[self.dtype]
        linear = sum(map(math.prod, shape.linear.values()))
        saved = linear * (8 * size - _BITS[self.weights]) // 8 if self.weights in _BITS else 0
        cache = 2 * shape.layers * self.slots * self.context * shape.kv_heads * shape.head_dim * size
        found = {
            "weights": shape.count * size - saved,
            "receive buffer": shape.count * BYTES[self.wire],
            "keys and values": cache,
        }
        return {name: -(-each // self.devices) for name, each in found.items()}

    @property
    def total(self) -> int:
        """Bytes on each device."""
        return sum(self.parts.values())

    @property
    def host(self) -> int:
        """Bytes on the host that are counted apart: none."""
        return 0
