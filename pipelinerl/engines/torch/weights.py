"""`TorchWeights`: a model's parameters as views of one flat byte buffer, with a second buffer for the next version.

`swap` re-points every parameter and copies nothing, so its cost does not depend on the size of the weights. There are
never more than two copies of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from inference_contract.weights import DType, ParameterSpec, WeightLayout


def layout_of(model: nn.Module) -> WeightLayout:
    """Return the layout of the model's parameters, with tied parameters once, under the first name, as in trainers."""
    return WeightLayout(
        parameters=tuple(
            ParameterSpec(name=name, shape=tuple(p.shape), dtype=DType(str(p.dtype).removeprefix("torch.")))
            for name, p in model.named_parameters()
        )
    )


def parameters_in(buffer: Tensor, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and views of the parameters that lie back to back in `buffer` u8 [layout.num_bytes]."""
    offset = 0
    for spec in layout.parameters:
        part = buffer[offset : offset + spec.num_bytes]
        # With mixed dtypes a parameter may be misaligned; a view needs alignment, so copy it.
        part = part if offset % spec.dtype.itemsize == 0 else part.clone()
        dtype: torch.dtype = getattr(torch, spec.dtype.value)
        yield spec.name, part.view(dtype).view(spec.shape)
        offset += spec.num_bytes


class TorchWeights:
    """The serving and the staged parameters of `model`; this object owns their memory from its construction on."""

    def __init__(self, model: nn.Module) -> None:
        self.layout = layout_of(model)
        self._parameters = dict(model.named_parameters())
        self._device = next(iter(self._parameters.values())).device
        # the views of all parameters by name, for the address of each of the two buffers
        self._views: dict[int, dict[str, Tensor]] = {}
        self._staged: Tensor | None = None
        self._current = self._buffer()
        offset = 0
        for parameter in self._parameters.values():
            source = parameter.detach().contiguous().view(-1).view(torch.uint8)
            self._current[offset : offset + source.numel()] = source
            offset += source.numel()
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
        return self._staged

    def finish_staging(self) -> None:
        """Do nothing: the bytes are served as they arrived."""

    def swap(self) -> None:
        """Make `staging` current; the previous weights become `staging`."""
        staged = self.staging()
        self._point_at(staged)
        self._current, self._staged = staged, self._current

    def _buffer(self) -> Tensor:
        return torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=self._device)

    def _point_at(self, buffer: Tensor) -> None:
        views = self._views.get(buffer.data_ptr())
        if views is None:
            views = dict(parameters_in(buffer, self.layout))
            # Reuse views in later swaps, but not copies of misaligned parameters.
            if all(each.untyped_storage().data_ptr() == buffer.data_ptr() for each in views.values()):
                self._views[buffer.data_ptr()] = views
        for name, values in views.items():
            self._parameters[name].data = values
