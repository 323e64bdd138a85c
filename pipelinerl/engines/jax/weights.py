"""`JaxWeights`: a decoder's weights on the device, and a host buffer in which the next version arrives.

`staging` has exactly the bytes of the layout, back to back. Names are Hugging Face's, and the order is that of the
JAX and torch trainers. `finish_staging` copies the parameters to the device one at a time, while decoding continues;
`swap` exchanges references and copies nothing. Shapes and shardings never change, so updates compile nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any, final

import jax
import numpy as np
from jax import Array
from jax.sharding import Sharding
from numpy.typing import NDArray

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.models.decoder_config import DecoderConfig, Parameter
from pipelinerl.models.jax_decoder import export_order


def layout_of(config: DecoderConfig, dtype: np.dtype[Any]) -> WeightLayout:
    """Return the layout of the parameters of `config` in `dtype`; those inside layers are listed once per layer."""
    return WeightLayout(
        parameters=tuple(
            ParameterSpec(name=parameter.name_at(layer or 0), shape=parameter.shape, dtype=DType(dtype.name))
            for parameter, layer in export_order(config)
        )
    )


@final
class JaxWeights:
    """The serving and the staged weights of a decoder.

    Args:
        current: the initial weights, stacked over layers, of one dtype.
        place: returns the sharding of a parameter.
    """

    def __init__(
        self, config: DecoderConfig, current: Mapping[str, Array], *, place: Callable[[Parameter], Sharding]
    ) -> None:
        self.current: Mapping[str, Array] = current
        self._config = config
        self._place = place
        self._dtype = next(iter(current.values())).dtype
        self.layout = layout_of(config, self._dtype)
        sizes = [spec.num_bytes for spec in self.layout.parameters]
        ends = accumulate(sizes)
        self._spans = {
            spec.name: slice(end - size, end)
            for spec, size, end in zip(self.layout.parameters, sizes, ends, strict=True)
        }
        self._bytes: NDArray[np.uint8] | None = None
        self._staged: Mapping[str, Array] | None = None

    def staging(self) -> NDArray[np.uint8]:
        """Return uint8 [layout.num_bytes] in host memory, allocated at the first call."""
        if self._bytes is None:
            self._bytes = np.empty(self.layout.num_bytes, np.uint8)
        return self._bytes

    def finish_staging(self) -> None:
        """Copy the staged bytes to device arrays; returns when the copies are complete."""
        staged = {}
        for parameter in self._config.parameters:
            parts = [self._array(name, parameter.shape) for name in parameter.names]
            stacked = parts[0].copy() if parameter.layers is None else np.stack(parts)  # JAX on a CPU keeps this memory
            staged[parameter.name] = jax.block_until_ready(jax.device_put(stacked, self._place(parameter)))
        self._staged = staged

    def swap(self) -> None:
        """Serve the staged weights; the old arrays are freed when the step that reads them has ended."""
        assert self._staged is not None, "finish_staging comes before each swap"
        self.current, self._staged = self._staged, None

    def _array(self, name: str, shape: tuple[int, ...]) -> NDArray[Any]:
        return self.staging()[self._spans[name]].view(self._dtype).reshape(shape)
