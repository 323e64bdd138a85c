"""`WorkerEndpointFactory`: joins weight groups for an engine through endpoints in the worker that has the device.

    engine's process                                   worker
      WorkerEndpoint ── orders: join, receive [a, b) ──▶ a thread ── Collective ── rank 0, gloo or NCCL
           ▲  ◀──── done, or the error ────────────        │
           └─ reads and hashes ◀── memory that both map ◀──┘

`torch_endpoint` is the worker's side. The worker connects once, at a socket path that is removed right after. Each
membership then has its own socket pair, one end of which is passed to the worker. Closing the other end leaves the
group, and so does the death of either process.

With NCCL, the bytes arrive on the device and are copied into the staging memory, bucket by bucket, while decoding
continues. The other workers of a tensor-parallel engine take their slices from there, so each engine receives one copy
of the model over the network.

| waits for | unblocked by | or, at the latest |
|---|---|---|
| the worker's answer | the group; the worker's death | the order's deadline, which the worker enforces |
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from inference_contract.errors import InvalidRequest
from inference_contract.weights import Backend, InitProcessGroupRequest
from pipelinerl.engines.options import EngineOptions
from pipelinerl.engines.weights.group_member import IN_PROCESS, EndpointFactory, GroupEndpoint
from pipelinerl.enums import Receiver
from pipelinerl.errors import DeadlineError, UpdateError

if TYPE_CHECKING:
    from pipelinerl.engines.weights.torch_shared_bytes import SharedBytes

_ERRORS: Final = {"deadline": DeadlineError, "broke": UpdateError}


class WorkerEndpointFactory:
    """Factory of endpoints in a worker, for `backends`; satisfies `EndpointFactory` once the worker has connected."""

    def __init__(self, backends: frozenset[Backend]) -> None:
        self._backends = backends
        self._line: socket.socket | None = None
        self._shared: SharedBytes | None = None

    def lend(self, shared: SharedBytes) -> None:
        """Set `shared` as the memory from which `buffer` returns parts; the worker must have mapped it."""
        self._shared = shared

    @contextmanager
    def accept_worker(self) -> Iterator[Path]:
        """Yield where a worker must call `serve_endpoints`; raise `UpdateError` if none has when the block ends."""
        # The folder is private to this user, so only this user's processes can connect.
        with tempfile.TemporaryDirectory(prefix="pipelinerl-") as folder, socket.socket(socket.AF_UNIX) as door:
            path = Path(folder) / "endpoint"
            door.bind(str(path))
            door.listen(1)
            yield path
            door.setblocking(False)  # fail instead of waiting if no connection is queued
            try:
                self._line, _ = door.accept()
            except BlockingIOError:
                raise UpdateError(
                    "no worker has connected to serve the engine's endpoint in the weight group"
                ) from None
            self._line.setblocking(True)

    def close(self) -> None:
        """Close the socket to the worker, which then joins no more groups. Repeating is a no-op."""
        if self._line is not None:
            self._line.close()

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """Return True if the worker's device can join a group of `backend`, wherever `staging` is."""
        return backend in self._backends

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Return a part of the shared memory: the worker cannot write to memory of the engine alone."""
        assert self._shared is not None
        try:
            self._shared.reserve(num_bytes)
        except OSError as error:
            raise InvalidRequest(
                f"weights sent in another dtype than this engine's need {num_bytes} more bytes of shared memory, which "
                f"are not available: {error.strerror}; set weights.dtype to engine.dtype, or free memory",
                param="layout",
            ) from error
        return self._shared.further[:num_bytes]

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Have the worker join a group, and return the endpoint."""
        ours, theirs = socket.socketpair()
        endpoint = WorkerEndpoint(ours, name=f"group {request.group!r} generation {request.generation}")
        with theirs:
            try:
                assert self._line is not None
                socket.send_fds(self._line, [b"m"], [theirs.fileno()])
            except OSError as error:
                endpoint.close()
                raise UpdateError(f"the engine's worker has ended: {error.strerror}") from error
        endpoint.order({"join": request.model_dump(mode="json")})
        return endpoint


class WorkerEndpoint:
    """The engine's side of a worker's endpoint; satisfies `GroupEndpoint`.

    Without `landing`, the worker writes received bytes into the staging buffer, which both processes map. With it, the
    worker writes into this shared array, and this process copies the bytes from there to the staging buffer.
    """

    def __init__(self, line: socket.socket, *, name: str, landing: NDArray[np.uint8] | None = None) -> None:
        self._line = line
        self._landing = landing
        self._answers = line.makefile("rb")
        self._name = name
        self._guard = threading.Lock()
        self._waits = False
        self._left = False

    def expect(self, key: str, *, deadline: float) -> str:
        """Have the worker wait for the text that rank 0 announces under `key`; return that text."""
        return str(
            self.order({"expect": key, "timeout_s": max(deadline - time.monotonic(), 1e-3)}).get("announced", "")
        )

    def broadcast(self, tensor: Any, *, deadline: float) -> None:
        """Have the worker receive the bytes of `tensor`; return once the worker no longer writes to them."""
        start = tensor.storage_offset() if self._landing is None else 0
        end = start + tensor.numel()
        self.order({"receive": [start, end], "timeout_s": max(deadline - time.monotonic(), 1e-3)})
        if self._landing is not None:
            tensor.numpy()[:] = self._landing[:end]

    def order(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send a command to the worker; return the answer. If the answer is an error, leave the group and raise it."""
        with self._guard:
            if self._left:
                raise UpdateError(f"this process has left {self._name}")
            self._waits = True
        try:
            self._line.sendall(json.dumps(order).encode() + b"\n")
            line = self._answers.readline()
        except OSError:
            line = b""
        finally:
            with self._guard:
                self._waits = False
                self._let_go()
        answer: dict[str, Any] = (
            json.loads(line) if line else {"error": "broke", "message": f"{self._name}: the worker has ended"}
        )
        if "error" in answer:
            self.close()
            raise _ERRORS[answer["error"]](answer["message"])
        return answer

    def close(self) -> None:
        """Leave the group. A worker that is executing an order may still write until the order ends."""
        with self._guard, suppress(OSError):
            self._left = True
            self._line.shutdown(socket.SHUT_WR)
        with self._guard:
            self._let_go()

    def _let_go(self) -> None:
        if self._left and not self._waits:
            self._answers.close()
            self._line.close()


_NURSERY: Final = "pipelinerl.engines.weights.torch_endpoint"
#: Size in bytes of the shared memory, larger than any piece of an update; only pages that were written take memory.
_MOST_BYTES: Final = 2**36


def endpoints_of(options: EngineOptions) -> EndpointFactory:
    """Return the endpoint factory for these options, for an engine whose staged weights are in its own process."""
    return OwnProcess() if options.receiver is Receiver.OWN_PROCESS else IN_PROCESS


class OwnProcess:
    """Factory of endpoints in separate processes, whose death the engine survives, for weights staged on the host.

    If a peer sends more than it announced, gloo throws in one of its own threads and ends the process. Each membership
    therefore has a forked process. If it ends, the update fails as if rank 0 had left, and the engine keeps serving.

        engine's process                      nursery, which has torch         a process for each membership
          OwnProcess ─────── starts ────────▶ torch_endpoint ───── forks ────▶ a thread ── Collective ── rank 0
              └─ WorkerEndpoint ── orders, answers, memory that both map ───────┘

    The cost is a process that holds torch, and one more copy of each received piece of weights. The nursery process
    ends with this object; if it was killed, the next membership starts another nursery.
    """

    def __init__(self) -> None:
        self._memory = os.memfd_create("pipelinerl-pieces")
        weakref.finalize(self, os.close, self._memory)
        os.truncate(self._memory, _MOST_BYTES)
        self._landing = np.frombuffer(mmap.mmap(self._memory, _MOST_BYTES), np.uint8)
        self._one_at_a_time = threading.Lock()
        self._line, self._end = self._nursery()

    def _nursery(self) -> tuple[socket.socket, Callable[[], object]]:
        ours, theirs = socket.socketpair()
        inherited = (theirs.fileno(), self._memory)
        command = [sys.executable, "-P", "-m", _NURSERY, *map(str, inherited)]
        with theirs:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=inherited)
        return ours, weakref.finalize(self, _end, ours, process)

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """Return True if `staging` is on the host, where the received bytes can be copied into it."""
        return backend is Backend.GLOO and str(getattr(staging, "device", "cpu")) == "cpu"

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Return a buffer in this process's memory; received bytes are copied into it."""
        return IN_PROCESS.buffer(staging, num_bytes)

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Fork a process that joins the group, and return its endpoint."""
        ours, theirs = socket.socketpair()
        name = f"group {request.group!r} generation {request.generation}"
        endpoint = WorkerEndpoint(ours, name=name, landing=self._landing)
        with theirs, self._one_at_a_time:
            try:
                socket.send_fds(self._line, [b"m"], [theirs.fileno()])
            except OSError:
                self._end()
                self._line, self._end = self._nursery()
                socket.send_fds(self._line, [b"m"], [theirs.fileno()])
        endpoint.order({"join": request.model_dump(mode="json")})
        return endpoint


def _end(line: socket.socket, nursery: subprocess.Popen[bytes]) -> None:
    line.close()
    nursery.kill()
    nursery.wait()
