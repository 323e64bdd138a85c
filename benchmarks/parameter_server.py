"""How long an engine takes to fetch new weights from a parameter server, against copying as many bytes.

The server is a process of its own; so is the rank 0 of a gloo group, for comparison. This process is the engine's
receiving thread: each arm ends with the bytes in one preallocated buffer and their digest compared. Per round:

    memcpy      copying the bytes once between two warm private buffers, no digest
    memory      a pull out of the server's mapped segment
    http        a pull over two HTTP/1.1 streams on loopback
    broadcast   receiving a gloo broadcast of the same bytes in the same buckets as an engine does
    push        what the trainer spends to put the version there, memory made by an earlier one

A segment is mapped by the first pull from it and then kept, which the rounds do not see: `first` is that once. The
decode loop is not running, and nothing else is: on two cores each arm has one for each of its two processes.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np
import torch

from benchmarks.measure import Interval, Row, paired, print_table, seconds_of, write_record
from inference_contract.schemas import DType, ParameterSpec, WeightLayout
from pipelinerl import rng
from pipelinerl.http_service import listen, serve
from pipelinerl.weights.collective import Collective, Rendezvous
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.parameter_server import ParameterServer, create_app
from pipelinerl.weights.publisher import Publication
from pipelinerl.weights.pull import PullOrder
from pipelinerl.weights.puller import WeightPuller
from pipelinerl.weights.push import Placement
from pipelinerl.weights.version_table import VersionTable

#: Parameters of a million bytes, as many as make about so many MB.
SIZES_MB: Final = (3, 24, 310)
_BUCKET_BYTES: Final = 16 * 2**20
_PATIENCE_S: Final = 60.0


def _layout(megabytes: int) -> WeightLayout:
    rows = [ParameterSpec(name=f"p{row}", shape=(500, 500), dtype=DType.FLOAT32) for row in range(megabytes)]
    return WeightLayout(parameters=tuple(rows))


def _server(port: Connection) -> None:
    """The parameter server's process: sends its port."""
    puller = WeightPuller(token=None)
    with listen("127.0.0.1", 0) as listener:
        port.send(listener.getsockname()[1])
        serve(create_app(ParameterServer(VersionTable(room=2), puller=puller, store=None), token=None), listener)


def _sender(orders: Connection, port: int, num_bytes: int) -> None:
    """The rank 0 of the group: broadcasts once for each order."""
    torch.set_num_threads(1)
    group, data = _joined(port, rank=0), torch.zeros(num_bytes, dtype=torch.uint8)
    while orders.recv():
        for start in range(0, num_bytes, _BUCKET_BYTES):
            group.broadcast(data[start : start + _BUCKET_BYTES], deadline=time.monotonic() + _PATIENCE_S)


def _joined(port: int, *, rank: int) -> Collective:
    return Collective.join(
        host="127.0.0.1", port=port, group="bench", generation=0, rank=rank, world_size=2, timeout_s=_PATIENCE_S
    )


@contextmanager
def _process(target: Any, *arguments: Any) -> Iterator[Connection]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    try:
        yield ours
    finally:
        process.kill()
        process.join(10)


def _measure(megabytes: int, rounds: int) -> tuple[dict[str, Interval], dict[str, Any]]:
    """Ratios to memcpy, and the record of one size."""
    layout = _layout(megabytes)
    source = rng.generator(0, "weights").integers(0, 256, layout.num_bytes, dtype=np.uint8)
    into = np.zeros_like(source)
    versions = iter(range(1, 10**6))
    rendezvous = Rendezvous("127.0.0.1")
    with (
        _process(_server) as server,
        _process(_sender, rendezvous.port, layout.num_bytes) as sender,
        closing(_placement(server)) as placement,
    ):
        url, group = placement.url, _joined(rendezvous.port, rank=1)
        newest = placement.place(layout, source, next(versions))

        def pull(puller: WeightPuller) -> None:
            version, digest = newest
            puller.fetch(_order(url, version, digest), into=into)

        def push() -> None:
            nonlocal newest
            newest = placement.place(layout, source, next(versions))

        def broadcast() -> None:
            sender.send(True)
            digest, flat = WeightDigest(), torch.from_numpy(into)
            for start in range(0, len(into), _BUCKET_BYTES):
                part = flat[start : start + _BUCKET_BYTES]
                group.broadcast(part, deadline=time.monotonic() + _PATIENCE_S)
                digest.update(part)
            digest.hexdigest()

        by_memory, by_http = WeightPuller(token=None), WeightPuller(token=None, shared_memory=False)
        first = seconds_of(lambda: pull(by_memory))()
        for _ in range(2):  # both of the server's segments are made, and mapped
            push()
            pull(by_memory)
        arms = {
            "memcpy": seconds_of(lambda: np.copyto(into, source)),
            "memory": seconds_of(lambda: pull(by_memory)),
            "http": seconds_of(lambda: pull(by_http)),
            "broadcast": seconds_of(broadcast),
            "push": seconds_of(push),
        }
        timings = paired(arms, rounds=rounds)
        sender.send(False)
    rendezvous.close()
    ratios = {arm: timings.ratio(arm, "memcpy") for arm in arms if arm != "memcpy"}
    gigabytes = {arm: layout.num_bytes / timings.median(arm) / 1e9 for arm in arms}
    record = {
        "num_bytes": layout.num_bytes,
        "ratio_to_memcpy": {arm: ratio.as_dict() for arm, ratio in ratios.items()},
        "broadcast_over_memory": timings.ratio("broadcast", "memory").as_dict(),
        "broadcast_over_http": timings.ratio("broadcast", "http").as_dict(),
        "gigabytes_per_s": gigabytes,
        "first_pull_s": first,
        **timings.as_dict(),
    }
    return ratios, record


class _Placement:
    """A trainer with one server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._placement = Placement([url], token=None)

    def place(self, layout: WeightLayout, source: np.ndarray[Any, Any], version: int) -> tuple[int, str]:
        """Push these bytes as that version; returns it with its digest."""

        def weights() -> Iterator[tuple[str, Any]]:
            at = 0
            for spec in layout.parameters:
                yield spec.name, source[at : at + spec.num_bytes].view(np.float32).reshape(spec.shape)
                at += spec.num_bytes

        publication = Publication(
            version=version, epoch=1, layout=layout, weights=weights, engines=(), membership=0, timeout_s=_PATIENCE_S
        )
        placed = self._placement.place(publication, {}, deadline=time.monotonic() + _PATIENCE_S)
        return version, placed.digest

    def close(self) -> None:
        """Close the connection."""
        self._placement.close()


def _placement(server: Connection) -> _Placement:
    if not server.poll(_PATIENCE_S):
        raise RuntimeError(f"the parameter server did not start within {_PATIENCE_S:g} s")
    return _Placement(f"http://127.0.0.1:{server.recv()}")


def _order(url: str, version: int, digest: str) -> PullOrder:
    deadline = time.monotonic() + _PATIENCE_S
    return PullOrder(
        sources=(url,), epoch=1, version=version, digest=digest, deadline=deadline, given_up=threading.Event()
    )


def run(*, quick: bool = False) -> dict[str, Any]:
    """Measure every size, print, and write the record."""
    torch.set_num_threads(1)
    payload: dict[str, Any] = {}
    rows = []
    for megabytes in SIZES_MB[:2] if quick else SIZES_MB:
        ratios, record = _measure(megabytes, rounds=3 if quick else 21)
        payload[f"{megabytes} MB"] = record
        speeds = record["gigabytes_per_s"]
        rows.append(Row(f"{megabytes} MB: memcpy, GB/s", speeds["memcpy"]))
        for arm, ratio in ratios.items():
            rows.append(Row(f"{megabytes} MB: {arm} ÷ memcpy", f"{ratio}   ({speeds[arm]:.2f} GB/s)"))
    print_table("parameter_server: fetching weights against copying them", rows)
    if not quick:
        write_record("parameter_server", payload)
    return payload


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
