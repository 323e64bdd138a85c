"""`EndpointFactory`: joins weight groups for an engine, by default in the engine's own process.

`worker_endpoint` is the alternative for models in other processes: the endpoint is then in the process with the device.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, final

import numpy as np

from inference_contract.weights import Backend, InitProcessGroupRequest


class GroupEndpoint(Protocol):
    """A rank's endpoint in a group that has formed, such as `pipelinerl.weights.broadcast.collective.Collective`.

    One thread at a time uses it; `close` may be called from another.
    """

    def expect(self, key: str, *, deadline: float) -> str:
        """Return the text that rank 0 announces as `key`, until `deadline` (monotonic seconds).

        Raises:
            DeadlineError, UpdateError: as `Collective.expect`.
        """
        ...

    def broadcast(self, tensor: Any, *, deadline: float) -> None:
        """Receive into `tensor`, a flat part of the engine's staging buffer, until `deadline` (monotonic seconds).

        Raises:
            DeadlineError, UpdateError: as `Collective.broadcast`; this rank has then left the group.
        """
        ...

    def close(self) -> None:
        """Leave the group. Twice is a no-op."""
        ...


class EndpointFactory(Protocol):
    """Factory of an engine's endpoints, in a process that can reach its staged weights."""

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """True if groups of `backend` can deliver bytes into `staging`."""
        ...

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Return a flat uint8 [num_bytes] buffer next to `staging`, for bytes that need conversion.

        Raises:
            InvalidRequest: there is not enough memory.
        """
        ...

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Join a group; blocks until every rank has joined.

        Raises:
            DeadlineError, UpdateError: as `Collective.join`.
        """
        ...


@final
class _InProcess:
    """Factory of endpoints in the engine's process, which receive straight into its staging buffer."""

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """True if the backend can deliver into `staging`: NCCL goes from GPU to GPU."""
        return backend is not Backend.NCCL or str(getattr(staging, "device", "cpu")).startswith("cuda")

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Return a new array of the same kind, on the same device."""
        if isinstance(staging, np.ndarray):
            return np.empty(num_bytes, np.uint8)
        return staging.new_empty(num_bytes)

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Join a group from this process."""
        return joined(request)


IN_PROCESS: Final[EndpointFactory] = _InProcess()


def joined(request: InitProcessGroupRequest) -> Any:
    """Return this process's `Collective` once every rank has joined."""
    # Imported late, because an engine without torch can serve until its first update.
    from pipelinerl.weights.broadcast.collective import Collective

    return Collective.join(
        host=request.rendezvous_host,
        port=request.rendezvous_port,
        group=request.group,
        generation=request.generation,
        rank=request.rank,
        world_size=request.world_size,
        backend=request.backend,
        connections=request.connections,
        timeout_s=request.timeout_s,
    )
