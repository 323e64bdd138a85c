"""The mesh of a JAX trainer: `data`, `fsdp` and `tensor`, and what lies where on it.

    data      rows of the micro-batch are divided; weights are whole on each
    fsdp      rows are divided, and so are weights, which are gathered layer by layer where they are used
    tensor    heads, intermediate features and vocabulary are divided (Megatron's split); rows are whole on each

How a parameter is divided stands in the decoder's table (`Parameter.axes`). Promises: a mesh that does not divide the
devices or the model is refused in one sentence, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from pipelinerl.models.decoder_config import DecoderConfig, Parameter
from trainer_contract.errors import SpecError

#: Axes over which the rows of a micro-batch are divided.
ROWS: Final = ("data", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        """Their product."""
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return f"data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}"


def build(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """A mesh over the first devices; with several processes it must take all of theirs.

    Raises:
        SpecError: there are not enough, or they are not divided without rest.
    """
    wanted = shape.num_devices
    if len(devices) % wanted or (jax.process_count() > 1 and wanted != len(devices)):
        raise SpecError(
            f"options.mesh ({shape}) makes {wanted} devices, which must divide the {len(devices)} that jax finds "
            "(and be all of them with several processes); change the mesh"
        )
    chosen = np.array(devices[:wanted]).reshape(shape.data, shape.fsdp, shape.tensor)
    return Mesh(chosen, ("data", "fsdp", "tensor"))


def check_divides(shape: MeshShape, config: DecoderConfig) -> None:
    """Raise SpecError when an axis does not divide what it would split."""
    for what, count in (("attention heads", config.heads), ("key-value heads", config.kv_heads)):
        if count % shape.tensor:
            raise SpecError(f"options.mesh: tensor={shape.tensor} does not divide the model's {count} {what}; lower it")
    sizes = {"fsdp": shape.fsdp, "tensor": shape.tensor}
    for parameter in config.parameters:
        for length, axis in zip(parameter.shape, parameter.axes, strict=True):
            if axis is not None and length % sizes[axis]:
                raise SpecError(
                    f"options.mesh: {axis}={sizes[axis]} does not divide the {length} of {parameter.name!r} "
                    f"{list(parameter.shape)}; choose a divisor"
                )


def of_parameter(mesh: Mesh, parameter: Parameter) -> NamedSharding:
    """Where the parts of a parameter (stacked over layers) lie."""
    return NamedSharding(mesh, P(*parameter.stacked_axes))


def gathered(mesh: Mesh, parameter: Parameter) -> NamedSharding:
    """The sharding of one layer's parameter where it is used: whole along `fsdp`, divided along `tensor`."""
    return NamedSharding(mesh, P(*(axis if axis == "tensor" else None for axis in parameter.axes)))


def everywhere(mesh: Mesh, value: np.ndarray[Any, Any]) -> jax.Array:
    """The same value on every device of every process."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P()), value.__getitem__)


def of_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of [R, …]: rows over `data` and `fsdp`."""
    return NamedSharding(mesh, P(ROWS))
