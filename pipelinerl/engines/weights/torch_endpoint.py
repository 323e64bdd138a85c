"""`serve_endpoints`: joins weight groups for an engine, in the worker that has the device; see `worker_endpoint`.

Each membership has two threads. The first executes the orders (join, expect, receive) that the engine sends over a
socket. The second notices immediately when the engine closes the socket, even during a receive. Both threads are
unblocked by the group, by the orders' deadlines, and by the death of the engine's process.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from inference_contract.weights import Backend, InitProcessGroupRequest
from pipelinerl.engines.weights.group_member import IN_PROCESS
from pipelinerl.errors import DeadlineError, PipelineError
from pipelinerl.system.background import in_background
from pipelinerl.weights.broadcast import collective  # noqa: F401  imported here once, instead of in each forked process
from pipelinerl.weights.broadcast.collective import Collective, Rendezvous


def serve_endpoints(path: Path, staged: Tensor, device: torch.device) -> None:
    """Serve the engine's endpoints on threads, by its socket `path`; received weights go to the shared `staged` u8."""
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))

    def serve() -> None:
        with line:
            while True:
                greeting, ends, _, _ = socket.recv_fds(line, 1, 1)
                if not greeting:
                    return  # the engine's process has ended
                in_background("endpoint", _Membership(socket.socket(fileno=ends[0]), staged, device).serve)

    in_background("endpoints", serve)


class _Membership:
    def __init__(self, line: socket.socket, staged: Tensor, device: torch.device) -> None:
        self._line = line
        self._staged = staged
        self._device = device
        self._landing: Tensor | None = None
        self._stream: Any = None  # the CUDA stream of `_landing`
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._group: Any = None
        self._left = False

    def serve(self) -> None:
        """Execute and answer the engine's orders (join, expect, receive) until the engine closes the socket."""
        in_background("orders", self._read)
        with self._line:
            try:
                for order in iter(self._orders.get, None):
                    self._line.sendall(json.dumps(self._answer(order)).encode() + b"\n")
            finally:
                self._leave()
                with suppress(OSError):  # `_read` keeps the socket open; without a shutdown, the engine would wait
                    self._line.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        """Queue the orders as they arrive, and leave the group as soon as the engine closes the socket."""
        try:
            for line in self._line.makefile("rb"):
                self._orders.put(json.loads(line))
        finally:
            self._orders.put(None)
            self._leave()

    def _answer(self, order: dict[str, Any]) -> dict[str, str]:
        try:
            if "join" in order:
                self._join(InitProcessGroupRequest.model_validate(order["join"]))
            elif "expect" in order:
                return {
                    "announced": self._group.expect(order["expect"], deadline=time.monotonic() + order["timeout_s"])
                }
            else:
                self._receive(*order["receive"], deadline=time.monotonic() + order["timeout_s"])
        except PipelineError as error:
            return {"error": "deadline" if isinstance(error, DeadlineError) else "broke", "message": str(error)}
        except RuntimeError as error:  # the device is out of memory, or has failed
            reason = str(error).partition("\n")[0]
            return {
                "error": "broke",
                "message": f"the worker's {self._device} failed: {type(error).__name__}: {reason}",
            }
        return {}

    def _join(self, request: InitProcessGroupRequest) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # CUDA's current device is per thread
        group = IN_PROCESS.join(request)
        with self._guard:
            self._group = group
            if self._left:
                group.close()

    def _receive(self, start: int, end: int, *, deadline: float) -> None:
        part = self._staged[start:end]
        if self._group.device.type == "cpu":
            self._group.broadcast(part, deadline=deadline)
            return
        if self._landing is None or self._landing.numel() < end - start:
            self._landing = torch.empty(end - start, dtype=torch.uint8, device=self._device)
            self._stream = torch.cuda.Stream()
            # torch reuses freed memory at once, so kernels queued earlier may still read it.
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # another CUDA stream, so that decoding continues
            self._group.broadcast(self._landing[: end - start], deadline=deadline)
            part.copy_(self._landing[: end - start])

    def _leave(self) -> None:
        with self._guard:
            self._left = True
            if self._group is not None:
                self._group.close()


#: Untyped, because torch's stubs omit most of the C++ API.
dist: Any = torch.distributed


def lead_group(meeting: Rendezvous, *, name: str, world_size: int, timeout_s: float) -> Collective:
    """Form the gloo group `name`; block until every other rank has joined at `meeting`, or raise `DeadlineError`.

    The other ranks call `init_process_group(init_method="tcp://…")` with the same group name. All ranks meet
    through keys of a store, so the key prefixes used here must be those of torch's `_new_process_group_helper`.
    """
    patience = timedelta(seconds=timeout_s)
    try:
        store = dist.TCPStore(meeting.host, meeting.port, is_master=False, wait_for_workers=False, timeout=patience)
        for prefix in (name, f"{name}/", "cpu/"):
            store = dist.PrefixStore(prefix, store)
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=meeting.host)]
        options._timeout = patience
        options._threads = 1
        made = dist.ProcessGroupGloo(store, 0, world_size, options)
    except RuntimeError as error:
        reason = str(error).splitlines()[0][:200]
        raise DeadlineError(
            f"the server's {world_size - 1} ranks have not joined {name} at {meeting.host}:{meeting.port}: {reason}"
        ) from error
    return Collective(made, store, backend=Backend.GLOO, name=f"group {name!r}")


def main(line: int, memory: int) -> None:
    """Fork a process for each group membership, when the membership's socket arrives over `line`; see `OwnProcess`.

        python -m pipelinerl.engines.weights.torch_endpoint LINE MEMORY      (two inherited file descriptors)

    This process receives no weights itself. It ends when the engine dies or closes the socket.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # reap the forked processes automatically
    staged = torch.from_numpy(np.frombuffer(mmap.mmap(memory, os.fstat(memory).st_size), np.uint8))
    with socket.socket(fileno=line) as door:
        while True:
            greeting, ends, _, _ = socket.recv_fds(door, 1, 1)
            if not greeting:
                return
            with socket.socket(fileno=ends[0]) as end:
                if os.fork() == 0:
                    door.close()
                    try:
                        _Membership(end, staged, torch.device("cpu")).serve()
                    finally:
                        os._exit(0)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
