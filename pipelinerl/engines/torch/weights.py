"""`TorchWeights`: a model's parameters as views of one flat byte buffer, with a second buffer for the next version.

`swap` re-points every parameter and copies nothing, so its cost does not depend on the size of the weights. There are
never more than two copies of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Final

import torch
from torch import Tensor, nn

from inference_contract.weights import DType, ParameterSpec, WeightLayout

#: Bytes of which the address of a parameter is a multiple: products of grouped experts require it on a GPU, and other
#: kernels are slow without.
_ALIGNMENT: Final = 16
#: Bytes that move at once to their aligned place, of which a copy is in memory meanwhile.
_MOVED: Final = 1 << 26


def layout_of(model: nn.Module) -> WeightLayout:
    """Return the layout of the model's parameters, with tied parameters once, under the first name, as in trainers."""
    return WeightLayout(
        parameters=tuple(
            ParameterSpec(name=name, shape=tuple(p.shape), dtype=DType(str(p.dtype).removeprefix("torch.")))
            for name, p in model.named_parameters()
        )
    )


def parameters_in(buffer: Tensor, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and values of the parameters that lie back to back in `buffer` u8 [layout.num_bytes].

    A value is a view, but a copy where mixed dtypes misalign a parameter.
    """
    for spec, part in bytes_in(buffer, layout):
        yield spec.name, _shaped(part if part.storage_offset() % spec.dtype.itemsize == 0 else part.clone(), spec)


def bytes_in(buffer: Tensor, layout: WeightLayout) -> Iterator[tuple[ParameterSpec, Tensor]]:
    """Yield the parameters that lie back to back in `buffer` u8 [layout.num_bytes], and the bytes of each."""
    yield from zip(layout.parameters, buffer.split([spec.num_bytes for spec in layout.parameters]), strict=True)


class TorchWeights:
    """The serving and the staged parameters of `model`; this object owns their memory from its construction on.

    Weights arrive back to back, so that a parameter of odd size would misalign those after it. If there is one, a
    buffer has room for gaps: weights arrive at its end, and `finish_staging` moves each parameter to its place.
    """

    def __init__(self, model: nn.Module) -> None:
        self.layout = layout_of(model)
        self._parameters = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        self._places = _aligned(self.layout)
        end = self._places[-1] + self.layout.parameters[-1].num_bytes
        self._gaps = _up(end - self.layout.num_bytes)
        # the views of all parameters by name, for the address of each of the two buffers
        self._views: dict[int, dict[str, Tensor]] = {}
        self._staged: Tensor | None = None
        self._current = self._buffer()
        for parameter, part in zip(self._parameters.values(), self._parts(self._current), strict=True):
            part.copy_(parameter.detach().contiguous().view(-1).view(torch.uint8))
            # Free this parameter's memory before the next one is copied.
            parameter.data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        self._point_at(self._current)

    @property
    def spare_bytes(self) -> int:
        """Bytes of copies other than the serving weights and `staging`: 0, because a swap serves `staging` itself."""
        return 0

    @property
    def address(self) -> int:
        """The memory address of the serving parameters; each swap alternates it between the two buffers."""
        return self._current.data_ptr()

    def staging(self) -> Tensor:
        """Return uint8 [layout.num_bytes], which the model does not read; allocated at the first call."""
        if self._staged is None:
            self._staged = self._buffer()
        return self._staged[self._gaps :]

    def finish_staging(self) -> None:
        """Move the parameters that arrived to their places; without gaps they are there."""
        if self._gaps == 0:
            return
        sent = bytes_in(self.staging(), self.layout)
        assert self._staged is not None, "staging() allocates it"
        for part, (_, arrived) in zip(self._parts(self._staged), sent, strict=True):
            for place, piece in zip(part.split(_MOVED), arrived.split(_MOVED), strict=True):
                place.copy_(piece.clone())  # both may overlap

    def swap(self) -> None:
        """Make `staging` current; the previous weights become `staging`."""
        if self._staged is None:
            self._staged = self._buffer()
        self._point_at(self._staged)
        self._current, self._staged = self._staged, self._current

    def _buffer(self) -> Tensor:
        make = torch.zeros if self._gaps else torch.empty  # a gap holds no weights, but a view of them may begin in one
        return make(self._gaps + self.layout.num_bytes, dtype=torch.uint8, device=self._device)

    def _parts(self, buffer: Tensor) -> Iterator[Tensor]:
        """Yield the bytes of each parameter in a buffer."""
        for start, spec in zip(self._places, self.layout.parameters, strict=True):
            yield buffer[start : start + spec.num_bytes]

    def _point_at(self, buffer: Tensor) -> None:
        views = self._views.get(buffer.data_ptr())
        if views is None:
            parts = zip(self.layout.parameters, self._parts(buffer), strict=True)
            views = {spec.name: _shaped(part, spec) for spec, part in parts}
            self._views[buffer.data_ptr()] = views
        for name, values in views.items():
            self._parameters[name].data = values


def _aligned(layout: WeightLayout) -> list[int]:
    """Return the offset of each parameter in a buffer in which all are aligned."""
    return list(accumulate((_up(spec.num_bytes) for spec in layout.parameters[:-1]), initial=0))


def _up(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shaped(part: Tensor, spec: ParameterSpec) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype.value)
    return part.view(dtype).view(spec.shape)
