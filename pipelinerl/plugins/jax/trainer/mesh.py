"""The mesh of a JAX trainer, with axes `data`, `fsdp` and `tensor`, and the shardings on it.

    data      rows of the micro-batch are sharded; each device holds whole weights
    fsdp      rows are sharded, and weights too; weights are gathered layer by layer where they are used
    tensor    heads, intermediate features and vocabulary are sharded (Megatron's split); each device sees whole rows

`Parameter.axes` gives each parameter's sharding. Before anything is loaded, this module checks that the mesh's size
divides the number of devices, and that each axis's size divides the dimensions which the axis shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from pipelinerl.models.decoder_config import DecoderConfig, Parameter
from pipelinerl.trainers.ranks.rendezvous import Distributed
from trainer_contract.errors import SpecError

#: Axes over which the rows of a micro-batch are sharded.
ROWS: Final = ("data", "fsdp")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """The number of devices along each axis."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        return f"data={self.data}, fsdp={self.fsdp}, tensor={self.tensor}"


def build(shape: MeshShape, devices: Sequence[Any]) -> Mesh:
    """Build a mesh over the first devices; several processes use all. Raises SpecError if sizes do not divide."""
    needed = shape.num_devices
    if len(devices) % needed or (jax.process_count() > 1 and needed != len(devices)):
        raise SpecError(
            f"options.mesh ({shape}) makes {needed} devices, which must divide the {len(devices)} that jax finds "
            "(and be all of them with several processes); change the mesh"
        )
    chosen = np.array(devices[:needed]).reshape(shape.data, shape.fsdp, shape.tensor)
    return Mesh(chosen, ("data", "fsdp", "tensor"))


def check_divides(shape: MeshShape, config: DecoderConfig) -> None:
    """Raise SpecError if an axis of the mesh does not divide a dimension of the model that it would shard."""
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
    """Return the sharding of a parameter's array, which stacks all layers if the parameter belongs to a layer."""
    return NamedSharding(mesh, P(*parameter.stacked_axes))


def gathered(mesh: Mesh, parameter: Parameter) -> NamedSharding:
    """Return a parameter's sharding while its layer computes: gathered over `fsdp`, still sharded over `tensor`."""
    return NamedSharding(mesh, P(*(axis if axis == "tensor" else None for axis in parameter.axes)))


def everywhere(mesh: Mesh, value: np.ndarray[Any, Any]) -> jax.Array:
    """Replicate `value` on every device of every process."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, P()), value.__getitem__)


def of_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of arrays [R, …], whose rows are divided over `data` and `fsdp`."""
    return NamedSharding(mesh, P(ROWS))


#: Factor by which JAX's timeouts exceed ours, so that ours expire first: our error message is clear, JAX's is a stack
#: trace.
_JAX_PATIENCE: Final = 4
_JAX_SHUTDOWN_S: Final = 10


def join(distributed: Distributed, port: int) -> None:
    """Join the other processes by JAX's rendezvous at `port` of the coordinator's host. Raises SpecError on failure."""
    if jax.distributed.is_initialized():
        raise SpecError("options.distributed: this process is one of several already; start another process")
    host = distributed.coordinator.rpartition(":")[0]
    # With this setting a process that ends does not wait for the others. This is safe, because our channels detect dead
    # ranks.
    jax.config.update("jax_enable_recoverability", True)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator_address=f"{host}:{port}",
            coordinator_bind_address=f"{host}:{port}",
            num_processes=distributed.processes,
            process_id=distributed.process,
            cluster_detection_method="deactivate",
            initialization_timeout=distributed.timeout_s,
            heartbeat_timeout_seconds=_JAX_PATIENCE * distributed.silence_s,
            shutdown_timeout_seconds=_JAX_SHUTDOWN_S,
        )
    except (RuntimeError, ValueError) as error:
        raise SpecError(f"options.distributed: the other processes cannot be joined: {error}") from error
