"""`KitTrainer`, rank 0 of the weight group: a second sender of weights, independent of `pipelinerl.weights`.

Its weights are a pure function of the layout and of a number, the tag. An engine that serves the weights of the same
tag again must therefore give the same answers.
"""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed
import xxhash

from inference_contract import routes
from inference_contract.conformance.session import Session, succeeded
from inference_contract.weights import WeightLayout

dist: Any = torch.distributed

_GROUP = "conformance"
_BUCKET_BYTES = 2**16
#: Seconds to wait after a join request, so that the engine is already waiting for the other ranks.
_JOINS_S = 0.3


def weights(layout: WeightLayout, tag: int) -> torch.Tensor:
    """Return the bytes [num_bytes] of the weights number `tag`: small, finite, and different for each tag."""
    parts = []
    for row, spec in enumerate(layout.parameters):
        at, count = tag + 7 * row, spec.num_bytes // spec.dtype.itemsize
        wave = torch.sin(torch.arange(count, dtype=torch.float64) * 0.7548776662 * (1 + at % 101) + at)
        size = 60 if spec.dtype == "int8" else 0.5
        parts.append((wave * size).to(getattr(torch, spec.dtype.value)).view(torch.uint8))
    return torch.cat(parts)


def converted(data: torch.Tensor, wire: WeightLayout, layout: WeightLayout) -> torch.Tensor:
    """Convert bytes of the layout `wire` to bytes of `layout`, which differs from it only in dtypes."""
    parts = zip(wire.parameters, wire.ends, layout.parameters, strict=True)
    return torch.cat(
        [
            data[end - sent.num_bytes : end]
            .clone()
            .view(getattr(torch, sent.dtype.value))
            .to(getattr(torch, kept.dtype.value))
            .view(torch.uint8)
            for sent, end, kept in parts
        ]
    )


def digest(data: torch.Tensor) -> str:
    """Return the contract's digest of these bytes."""
    return xxhash.xxh3_128(data.numpy().tobytes()).hexdigest()


def _listening_store(host: str) -> tuple[Any, int]:
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    # Pass our own listening socket: a store that opens one itself listens on every address.
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    return store, port


class KitTrainer:
    """Forms groups of itself and the engine, and sends updates through them."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._host = session.host
        self._store, self._port = _listening_store(self._host)
        self._group: Any = None
        card = session.card()
        # Start above the engine's epoch, so that the kit can run repeatedly.
        self.epoch = card.epoch + 1
        self.layout = card.layout
        self.generation = 1000 * self.epoch
        self.version = card.model_version

    def close(self) -> None:
        self._group = self._store = None

    def join_request(self, generation: int, **fields: Any) -> dict[str, Any]:
        return {
            "group": _GROUP,
            "backend": "gloo",
            "rendezvous_host": self._host,
            "rendezvous_port": self._port,
            "rank": 1,
            "world_size": 2,
            "generation": generation,
            "timeout_s": self._session.timeout_s / 2,
        } | fields

    def form(self) -> httpx.Response:
        """Form a new group, with a higher generation than the last; return the engine's answer."""
        self.leave()
        self.generation += 1
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self._session.post, routes.INIT_PROCESS_GROUP, self.join_request(self.generation))
            self._group = self._joined(self.generation)
            return answer.result()

    def form_and_abandon(self) -> httpx.Response:
        """Have the engine join a group that never completes, then close the store; return the engine's answer."""
        store, port = _listening_store(self._host)
        request = self.join_request(self.generation + 500, rendezvous_port=port, world_size=3)
        with ThreadPoolExecutor(1) as thread:
            answer = thread.submit(self._session.post, routes.INIT_PROCESS_GROUP, request)
            time.sleep(_JOINS_S)
            del store
            return answer.result()

    def formed(self) -> None:
        if self._group is None:
            succeeded(self.form())

    def leave(self) -> None:
        """Leave the group; an engine that waits in a broadcast notices immediately."""
        self._group = None

    def _joined(self, generation: int) -> Any:
        timeout = timedelta(seconds=self._session.timeout_s / 2)
        store = dist.PrefixStore(
            f"{_GROUP}/{generation}",
            dist.TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=timeout),
        )
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._host)]
        options._timeout = timeout
        return dist.ProcessGroupGloo(store, 0, 2, options)

    def update(self, phase: str, version: int, **fields: Any) -> httpx.Response:
        """POST /request_weight_update; by default PREPARE names the group and the engine's layout."""
        request: dict[str, Any] = {
            "phase": phase,
            "version": version,
            "epoch": self.epoch,
            "bucket_bytes": _BUCKET_BYTES,
            "timeout_s": self._session.timeout_s / 2,
        }
        if phase == "prepare":
            request |= {"group": _GROUP, "generation": self.generation}
            if "layout_id" not in fields:
                request["layout"] = self.layout.model_dump(mode="json")
        return self._session.post(routes.REQUEST_WEIGHT_UPDATE, request | fields)

    def broadcast(self, data: torch.Tensor, *, layout: WeightLayout | None = None) -> None:
        """Broadcast weights `data` piece by piece, cut according to `layout` (by default, the engine's layout)."""
        for start, end in (layout or self.layout).pieces(_BUCKET_BYTES):
            options = dist.BroadcastOptions()
            options.rootRank = 0
            options.timeout = timedelta(seconds=self._session.timeout_s / 2)
            self._group.broadcast([data[start:end]], options).wait(options.timeout)

    def next_version(self) -> int:
        self.version += 1
        return self.version

    def weights(self, tag: int) -> torch.Tensor:
        return weights(self.layout, tag)

    def digest(self, tag: int) -> str:
        return digest(self.weights(tag))

    def publish(self, data: int | torch.Tensor) -> int:
        """Run a whole update with these bytes, or with the weights of this tag; return its version."""
        data = self.weights(data) if isinstance(data, int) else data
        self.formed()
        version = self.next_version()
        self.accepted(self.update("prepare", version), "prepared")
        self.broadcast(data)
        self.committed(version, digest=digest(data))
        return version

    def committed(self, version: int, **fields: Any) -> None:
        """Send COMMIT; fail unless the answer says that `version` is now served."""
        answer = self.accepted(self.update("commit", version, **fields), "committed")
        assert (answer["epoch"], answer["version"]) == (self.epoch, version), "COMMIT must name the version served"

    @staticmethod
    def accepted(response: httpx.Response, status: str) -> dict[str, Any]:
        """Return the JSON of the response; fail unless it is a 200 with the given `status`."""
        answer: dict[str, Any] = succeeded(response)
        assert answer["status"] == status, f"the phase must end {status!r}, got {answer['status']!r}"
        return answer
