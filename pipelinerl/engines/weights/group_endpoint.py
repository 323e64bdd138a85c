"""`EndpointFactory`: how an engine joins a weight group, in its own process unless it brings another way.

`worker_endpoint` is the other way: the model is in other processes, and the endpoint is where the device is.
"""

from __future__ import annotations

from typing import Any, Final, Protocol, final

import numpy as np

from inference_contract.weights import Backend, InitProcessGroupRequest


class GroupEndpoint(Protocol):
    """A rank's place in a group that has formed; `pipelinerl.weights.broadcast.collective.Collective` is one.

    Used by one thread at a time; `close` may come from another.
    """

    def expect(self, key: str, *, deadline: float) -> str:
        """What rank 0 announces as `key`, until `deadline` (monotonic seconds).

        Raises:
            DeadlineError, UpdateError: as `Collective.expect`.
        """
        ...

    def broadcast(self, tensor: Any, *, deadline: float) -> None:
        """Receive into `tensor`, a flat part of the engine's staging buffer, until `deadline` (monotonic seconds).

        Raises:
            DeadlineError, UpdateError: as `Collective.broadcast`; this rank has left the group then.
        """
        ...

    def close(self) -> None:
        """Leave the group. Twice is a no-op."""
        ...


class EndpointFactory(Protocol):
    """Makes an engine's endpoints, where its staged weights can be reached."""

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """Returns whether groups of `backend` can bring bytes into `staging`."""
        ...

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Flat uint8 [num_bytes] beside `staging`, for bytes that are no weights of the model's yet.

        Raises:
            InvalidRequest: there is no room for so many.
        """
        ...

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Take the endpoint; blocks until every rank has come.

        Raises:
            DeadlineError, UpdateError: as `Collective.join`.
        """
        ...


@final
class _InProcess:
    """The endpoint is in the engine's process, and bytes go straight into its staging buffer."""

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """Returns whether `staging` lies where the backend carries bytes to: NCCL goes from GPU to GPU."""
        return backend is not Backend.NCCL or str(getattr(staging, "device", "cpu")).startswith("cuda")

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """A fresh array of the same kind, on the same device."""
        if isinstance(staging, np.ndarray):
            return np.empty(num_bytes, np.uint8)
        return staging.new_empty(num_bytes)

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Join a group from this process."""
        return joined(request)


IN_PROCESS: Final[EndpointFactory] = _InProcess()


def joined(request: InitProcessGroupRequest) -> Any:
    """The `Collective` of this process, once every rank has come."""
    # Torch is needed here and not before: an engine without it serves until somebody wants to update it.
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
