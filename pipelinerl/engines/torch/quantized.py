"""Linear layers in integer arithmetic: weights are quantised once per update, activations at each call.

    y = (x̂ Ŵᵀ) · s_x · s_w + b      x̂ = round(x / s_x), s_x = max|x| / 127 for each token,
                                    Ŵ = round(W / s_w), s_w = max|W| / levels for each output channel

The scheme is symmetric and dynamic (W8A8, the INT8 rollout of the TIS note, Yao et al. 2025). Both factors are i8 and
their product is exact in i32, so a token's result does not depend on the rest of the batch. Embeddings, norms, biases
and the output head keep the model's dtype, because the head's error would directly affect the logits.

Activations are quantised for speed: on a CPU, torch's weight-only product is up to 40 times slower than a float32
product. The dynamic product is 2 to 4 times faster than float32 from a width of about 512 on; narrower models are
slowed down by the overhead of the calls.

The layout and the digest of an update are those of the unquantised model. `finish_staging` quantises the received
weights while decoding continues, so `swap` copies nothing.

Memory, with L bytes of linear layers and R bytes of other parameters in the model's dtype: the served weights take L/4
+ R in float32, or L/2 + R in bfloat16. From the first update on there are two such sets and a staging buffer of L + R:
in float32 1.5 L + 3 R in all, where unquantised weights take 2 L + 2 R.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from pipelinerl.engines.torch.weights import layout_of, parameters_in
from pipelinerl.enums import WeightFormat
from pipelinerl.errors import ModelError

#: The largest quantised weight of each format; activations always use eight bits.
_LEVELS: Final[Mapping[WeightFormat, int]] = {WeightFormat.INT8: 127, WeightFormat.INT4: 7}
#: CUDA's integer product needs at least this many rows, and sizes that are multiples of eight.
_CUDA_ROWS: Final = 17
_CUDA_MULTIPLE: Final = 8
#: The number of weights quantised at once, small enough that intermediate results mostly stay in the CPU's cache.
_BLOCK: Final = 1 << 20


def quantize(x: Tensor, levels: int) -> tuple[Tensor, Tensor]:
    """Return values i8 [R, C] within ±levels and steps f32 [R, 1], such that `x` [R, C] ≈ values · steps. A row with a
    NaN or an infinity has a non-finite step, so the result is non-finite too.
    """
    step = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True, dtype=torch.float32)
    step = step.div_(levels).clamp_min_(torch.finfo(torch.float32).tiny)
    return (x / step).round_().to(torch.int8), step


@dataclass(frozen=True, slots=True)
class QuantizedLinear:
    """Forward of a linear layer: weight i8 [out, in], scale f32 [out], bias [out]; a swap changes their data."""

    weight: Tensor
    scale: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        """Return […, out] for `x` […, in], in the dtype of `x`."""
        values, step = quantize(x.reshape(-1, x.shape[-1]), _LEVELS[WeightFormat.INT8])
        rows = len(values)
        if values.is_cuda and rows < _CUDA_ROWS:
            values = pad(values, (0, 0, 0, _CUDA_ROWS - rows))
        y = (torch._int_mm(values, self.weight.t())[:rows] * step).mul_(self.scale).to(x.dtype)
        if self.bias is not None:
            y = y.add_(self.bias)
        return y.view(*x.shape[:-1], -1)


class QuantizedWeights:
    """The serving and the staged parameters of `model`, in memory that this object owns; linear layers are quantised.
    Raises `ModelError` if no linear layers can be quantised, if they share weights, or if CUDA has no product of their
    sizes.
    """

    def __init__(self, model: nn.Module, weights: WeightFormat) -> None:
        self.layout = layout_of(model)
        self._levels = _LEVELS[weights]
        linears = dict(_linears(model, [spec.name for spec in self.layout.parameters]))
        if not linears:
            raise ModelError(
                f"{type(model).__name__} has no torch.nn.Linear besides its head, so weights {weights} would change "
                "nothing; serve it with weights native"
            )
        for name, module in linears.items():
            if module.weight.is_cuda and any(size % _CUDA_MULTIPLE for size in module.weight.shape):
                raise ModelError(
                    f"{name} has shape {tuple(module.weight.shape)}; CUDA multiplies integers in multiples of "
                    f"{_CUDA_MULTIPLE} only; serve the model with weights native"
                )
            _replace(module, self._levels)
        #: Maps the name of each quantised parameter to the name of its scale.
        self._scales = {name: f"{name.removesuffix('weight')}scale" for name in linears}
        self._served = dict(model.named_parameters())
        unknown = self._served.keys() - {spec.name for spec in self.layout.parameters} - set(self._scales.values())
        if unknown:
            raise ModelError(
                f"{', '.join(sorted(unknown))} share their weights with other linear layers, which weights {weights} "
                "would separate; serve the model with weights native"
            )
        self._device = next(iter(self._served.values())).device
        self._staged: Tensor | None = None
        self._spare: dict[str, Tensor] = {}

    @property
    def spare_bytes(self) -> int:
        """Bytes of the second set of quantised weights, which the first update allocates."""
        return sum(parameter.nbytes for parameter in self._served.values())

    def staging(self) -> Tensor:
        """Return uint8 [layout.num_bytes], which the model does not read; allocated at the first call."""
        if self._staged is None:
            self._staged = torch.empty(self.layout.num_bytes, dtype=torch.uint8, device=self._device)
        return self._staged

    def finish_staging(self) -> None:
        """Quantise the staged weights into the second set of quantised weights, which `swap` then serves."""
        if not self._spare:
            self._spare = {name: torch.empty_like(parameter.data) for name, parameter in self._served.items()}
        for name, sent in parameters_in(self.staging(), self.layout):
            if name not in self._scales:
                self._spare[name].copy_(sent)
                continue
            rows = max(1, _BLOCK // sent.shape[1])
            weight, scale = self._spare[name], self._spare[self._scales[name]]
            for part, into, steps in zip(sent.split(rows), weight.split(rows), scale.split(rows), strict=True):
                values, step = quantize(part, self._levels)
                into.copy_(values)
                steps.copy_(step[:, 0])

    def swap(self) -> None:
        """Serve the staged set; the set that served before becomes the staging set."""
        for name, parameter in self._served.items():
            parameter.data, self._spare[name] = self._spare[name], parameter.data


def _linears(model: Any, names: list[str]) -> Iterator[tuple[str, nn.Linear]]:
    head = model.get_output_embeddings()
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        if attribute == "weight" and isinstance(module, nn.Linear) and module is not head:
            yield name, module


def _replace(module: Any, levels: int) -> None:
    values, step = quantize(module.weight.detach(), levels)
    module.weight = nn.Parameter(values, requires_grad=False)
    module.scale = nn.Parameter(step[:, 0], requires_grad=False)
    module.forward = QuantizedLinear(module.weight, module.scale, module.bias)
