"""Initialisation of multi-process JAX, once all processes have connected."""

from __future__ import annotations

from typing import Final

import jax

from pipelinerl.trainers.ranks.distributed import Distributed
from trainer_contract.errors import SpecError

#: Factor by which JAX's timeouts exceed ours. JAX ends the process with a stack trace; ours must fire first, because
#: they end it with a clear message.
_JAX_PATIENCE: Final = 4
_JAX_SHUTDOWN_S: Final = 10


def join(distributed: Distributed, port: int) -> None:
    """Join the other processes at `port` on the coordinator's host. Raises SpecError."""
    if jax.distributed.is_initialized():
        raise SpecError("options.distributed: this process is one of several already; start another process")
    host = distributed.coordinator.rpartition(":")[0]
    # Our channels detect dead ranks, so JAX need not wait for the other ranks when a process ends.
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
