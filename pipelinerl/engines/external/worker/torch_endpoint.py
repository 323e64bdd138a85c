"""`serve_endpoints`: joins weight groups for an engine where the device is, in a worker; see `worker_endpoint`.

Each membership has a thread that does what the engine orders, and one that hears at once when the engine hangs up,
whatever is being received. Unblocked by the group, by its deadlines, and by the death of the engine's process.
"""

from __future__ import annotations

import json
import queue
import socket
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from inference_contract.weights import InitProcessGroupRequest
from pipelinerl.engines.weights.group_endpoint import joined
from pipelinerl.errors import DeadlineError, PipelineError
from pipelinerl.system.background import in_background


def serve_endpoints(path: Path, staged: Tensor, device: torch.device) -> None:
    """Connect to the engine at `path`, and take its endpoints from now on, on threads.

    Args:
        staged: u8 [all bytes of a version] on the host, mapped by both.
        device: this worker's.
    """
    line = socket.socket(socket.AF_UNIX)
    line.connect(str(path))
    in_background("endpoints", lambda: _serve(line, staged, device))


def _serve(line: socket.socket, staged: Tensor, device: torch.device) -> None:
    with line:
        while True:
            greeting, ends, _, _ = socket.recv_fds(line, 1, 1)
            if not greeting:
                return  # the engine's process has ended
            in_background("endpoint", partial(serve_membership, socket.socket(fileno=ends[0]), staged, device))


def serve_membership(line: socket.socket, staged: Tensor, device: torch.device) -> None:
    """Take one endpoint, and do what the engine orders over `line` until it hangs up."""
    _Membership(line, staged, device).serve()


@final
class _Membership:
    """One endpoint, from the order to join until the engine hangs up."""

    def __init__(self, line: socket.socket, staged: Tensor, device: torch.device) -> None:
        self._line = line
        self._staged = staged
        self._device = device
        self._landing: Tensor | None = None
        self._orders: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._guard = threading.Lock()
        self._group: Any = None
        self._left = False

    def serve(self) -> None:
        """Do what the engine orders, and answer; returns when it has hung up."""
        in_background("orders", self._read)
        with self._line:
            try:
                for order in iter(self._orders.get, None):
                    self._line.sendall(json.dumps(self._answer(order)).encode() + b"\n")
            finally:
                self._leave()
                with suppress(OSError):  # the other thread's file would keep it open, and the engine waiting
                    self._line.shutdown(socket.SHUT_RDWR)

    def _read(self) -> None:
        """Orders as they come; that the engine hangs up is heard at once, whatever is being received."""
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
                return {"said": self._group.expect(order["expect"], deadline=time.monotonic() + order["timeout_s"])}
            else:
                self._receive(*order["receive"], deadline=time.monotonic() + order["timeout_s"])
        except PipelineError as error:
            return {"error": "deadline" if isinstance(error, DeadlineError) else "broke", "message": str(error)}
        except RuntimeError as error:  # the device's: it has no room, or has failed
            reason = str(error).partition("\n")[0]
            return {
                "error": "broke",
                "message": f"the worker's {self._device} failed: {type(error).__name__}: {reason}",
            }
        return {}

    def _join(self, request: InitProcessGroupRequest) -> None:
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # of this thread
        group = joined(request)
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
        with torch.cuda.stream(torch.cuda.Stream()):  # decoding goes on in its own
            self._group.broadcast(self._landing[: end - start], deadline=deadline)
            part.copy_(self._landing[: end - start])

    def _leave(self) -> None:
        with self._guard:
            self._left = True
            if self._group is not None:
                self._group.close()
