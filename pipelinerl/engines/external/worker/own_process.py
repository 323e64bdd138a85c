"""`OwnProcess`: an engine's endpoint in the weight group in a process of its own, whose death the engine survives.

If a peer sends more than it announced, gloo throws in one of its own threads, which ends the process. With
`OwnProcess`, this is a process that was forked for this membership alone. The update then fails as if rank 0 had left,
and the engine keeps serving.

    engine's process                      nursery, which has torch         a process for each membership
      OwnProcess ─────── starts ────────▶ nursery_torch ────── forks ────▶ a thread ── Collective ── rank 0
          └─ WorkerEndpoint ── orders, answers, memory that both map ───────┘

The cost is a process that holds torch, and one more copy of each piece, from the shared memory to the staging buffer.
"""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, final

import numpy as np
from numpy.typing import NDArray

from inference_contract.weights import Backend, InitProcessGroupRequest
from pipelinerl.engines.external.worker.worker_endpoint import WorkerEndpoint
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.group_endpoint import IN_PROCESS, EndpointFactory, GroupEndpoint
from pipelinerl.enums import Receiver

_NURSERY: Final = "pipelinerl.engines.external.worker.nursery_torch"
#: Larger than any piece; the memory is sparse, so only pages that were written take space.
_MOST_BYTES: Final = 2**36


def endpoints_of(options: EngineOptions) -> EndpointFactory:
    """Return the endpoint factory for these options, for an engine whose staged weights are in its own process."""
    return OwnProcess() if options.receiver is Receiver.OWN_PROCESS else IN_PROCESS


@final
class OwnProcess:
    """Factory of endpoints in separate processes, for weights that are staged on the host.

    Satisfies `EndpointFactory`. The nursery process ends with this object; if it was killed, the next membership starts
    another nursery.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("pipelinerl-pieces")
        weakref.finalize(self, os.close, self._memory)
        os.truncate(self._memory, _MOST_BYTES)
        self._landing = np.frombuffer(mmap.mmap(self._memory, _MOST_BYTES), np.uint8)
        self._one_at_a_time = threading.Lock()
        self._line, self._end = self._nursery()

    def _nursery(self) -> tuple[socket.socket, Callable[[], object]]:
        """Start a nursery; return the socket to it and the function that ends it."""
        ours, theirs = socket.socketpair()
        inherited = (theirs.fileno(), self._memory)
        command = [sys.executable, "-m", _NURSERY, *map(str, inherited)]
        with theirs:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
        return ours, weakref.finalize(self, _end, ours, process)

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """True if the bytes can be copied to their target, which is from host to host only."""
        return backend is Backend.GLOO and str(getattr(staging, "device", "cpu")) == "cpu"

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Return the buffer that an endpoint in the engine's own process would use."""
        return IN_PROCESS.buffer(staging, num_bytes)

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Fork a process that joins the group, and return its endpoint."""
        ours, theirs = socket.socketpair()
        endpoint = WorkerEndpoint(ours, name=f"group {request.group!r} generation {request.generation}")
        with theirs, self._one_at_a_time:
            try:
                socket.send_fds(self._line, [b"m"], [theirs.fileno()])
            except OSError:
                self._end()
                self._line, self._end = self._nursery()
                socket.send_fds(self._line, [b"m"], [theirs.fileno()])
        endpoint.order({"join": request.model_dump(mode="json")})
        return _Copied(endpoint, self._landing)


@final
class _Copied:
    """Endpoint that receives in another process and copies the bytes from the shared memory; satisfies
    `GroupEndpoint`.
    """

    def __init__(self, endpoint: WorkerEndpoint, landing: NDArray[np.uint8]) -> None:
        self._endpoint = endpoint
        self._landing = landing

    def expect(self, key: str, *, deadline: float) -> str:
        """Wait in the other process for rank 0's announcement."""
        return self._endpoint.expect(key, deadline=deadline)

    def broadcast(self, tensor: Any, *, deadline: float) -> None:
        """Receive `tensor`'s bytes in the other process, and copy them into `tensor`."""
        self._endpoint.receive(0, tensor.numel(), deadline=deadline)
        tensor.numpy()[:] = self._landing[: tensor.numel()]

    def close(self) -> None:
        """Leave the group."""
        self._endpoint.close()


def _end(line: socket.socket, nursery: subprocess.Popen[bytes]) -> None:
    line.close()
    nursery.kill()
    nursery.wait()
