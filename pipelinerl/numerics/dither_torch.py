"""Dithered rounding in torch for any device, and a probe that measures how much of an update survives rounding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch
from torch import Tensor

from pipelinerl.numerics import dither
from trainer_contract.types import Rounding

#: Approximate number of elements that the probe samples of each parameter.
_PROBED: Final = 1021


def rounded(values: Tensor, dtype: torch.dtype, rounding: Rounding, *, name: str, first: int = 0) -> Tensor:
    """Round the elements of the parameter `name` from index `first` on to `dtype`; only fp32 values to bf16 are
    dithered.
    """
    if rounding is Rounding.DITHERED and dtype is torch.bfloat16 and values.dtype is torch.float32:
        return dithered(values, name=name, first=first)
    return values.to(dtype)


def dithered(values: Tensor, *, name: str, first: int = 0) -> Tensor:
    """Round f32 `values`, the elements of the parameter `name` from index `first` on, to bfloat16."""
    bits = values.detach().contiguous().view(-1).view(torch.int32)
    result = torch.empty(values.shape, dtype=torch.bfloat16, device=values.device)
    halves, table = result.view(-1).view(torch.int16), _thresholds(values.device)
    place = dither.phase(name) + first
    begin = 0
    while begin < len(bits):
        start = (place + begin) % dither.PERIOD
        noise = table[start : start + len(bits) - begin]
        end = begin + len(noise)
        halves[begin:end] = (bits[begin:end] + noise) >> 16
        begin = end
    return result


@cache
def _thresholds(device: torch.device) -> Tensor:
    return torch.from_numpy(dither.thresholds()).to(device)


@dataclass(frozen=True, slots=True)
class UpdateProbe:
    """Measures, on a sample of the weights, the share of an update that engines see after rounding.

    `places` selects the sampled elements of each parameter. `noise`, i32 [N], holds the thresholds of all sampled
    elements; None if weights are rounded to nearest.
    """

    weights: Mapping[str, Tensor]
    places: Mapping[str, slice]
    noise: Tensor | None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], dtype: torch.dtype, rounding: Rounding) -> UpdateProbe | None:
        """Return a probe if all `weights` are fp32 and are sent in bfloat16 (`dtype`), otherwise None."""
        if dtype is not torch.bfloat16 or any(each.dtype is not torch.float32 for each in weights.values()):
            return None
        places = {name: slice(0, None, max(1, each.numel() // _PROBED)) for name, each in weights.items()}
        if rounding is Rounding.NEAREST:
            return cls(weights, places, None)
        table = _thresholds(torch.device("cpu"))
        noise = [
            table[(torch.arange(weights[name].numel())[each] + dither.phase(name)) % dither.PERIOD]
            for name, each in places.items()
        ]
        return cls(weights, places, torch.cat(noise))

    def read(self) -> Tensor:
        """Return the current values of the sampled weights, f32 [N], on the host."""
        return torch.cat([self.weights[name].view(-1)[each].cpu() for name, each in self.places.items()])

    def share(self, before: Tensor, after: Tensor) -> float | None:
        """Return ⟨Δrounded, Δ⟩ / ⟨Δ, Δ⟩ for Δ = after − before: 1 if engines see it all, None if Δ = 0."""
        update = (after - before).double()
        size = float(update @ update)
        return float((self._sent(after) - self._sent(before)).double() @ update) / size if size else None

    def _sent(self, values: Tensor) -> Tensor:
        if self.noise is None:
            return values.bfloat16().float()
        return ((values.view(torch.int32) + self.noise) >> 16 << 16).view(torch.float32)
