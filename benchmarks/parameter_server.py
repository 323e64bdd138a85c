"""How long an engine takes to fetch new weights from a parameter server, against copying as many bytes.

The server is a process of its own; so is the rank 0 of a gloo group, for comparison. This process is the engine's
receiving thread: each arm ends with the bytes in one preallocated buffer and their digest compared. Per round:

    memcpy      copying the bytes once between two warm private buffers, no digest
    memory      a pull out of the server's mapped segment
    http        a pull over two HTTP/1.1 streams on loopback
    …, 2 shards the same with two servers, each of which holds half
    broadcast   receiving a gloo broadcast of the same bytes in the same buckets as an engine does
    push        what the trainer spends to put the version there, memory made by an earlier one; also by HTTP

A segment is mapped by the first pull from it and then kept, which the rounds do not see: `first` is that once. The
decode loop is not running, and nothing else is: on two cores each arm has one for each of its two processes.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, final

import numpy as np
import torch

from benchmarks.measure import Interval, Row, paired, print_table, seconds_of, write_record
from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl import rng
from pipelinerl.system.http_service import listen, serve
from pipelinerl.weights.broadcast.collective import Collective, Rendezvous
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.parameter_server.download import WeightPuller
from pipelinerl.weights.parameter_server.server import ParameterServer, create_app
from pipelinerl.weights.parameter_server.upload import Uploader
from pipelinerl.weights.parameter_server.version_table import VersionTable
from pipelinerl.weights.publisher import Publication
from pipelinerl.weights.pull import PullOrder, Shard

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
    rendezvous = Rendezvous("127.0.0.1")
    with ExitStack() as stack:
        sender = stack.enter_context(_process(_sender, rendezvous.port, layout.num_bytes))
        group = _joined(rendezvous.port, rank=1)

        def trainer(shards: int, *, shared_memory: bool = True) -> _Trainer:
            urls = [_url(stack.enter_context(_process(_server))) for _ in range(shards)]
            return stack.enter_context(closing(_Trainer(layout, source, urls, shared_memory=shared_memory)))

        def broadcast() -> None:
            sender.send(True)
            digest, flat = WeightDigest(), torch.from_numpy(into)
            for start in range(0, len(into), _BUCKET_BYTES):
                part = flat[start : start + _BUCKET_BYTES]
                group.broadcast(part, deadline=time.monotonic() + _PATIENCE_S)
                digest.update(part)
            digest.hexdigest()

        whole, halves = trainer(1), trainer(2)
        whole_by_http, halves_by_http = trainer(1, shared_memory=False), trainer(2, shared_memory=False)
        first = seconds_of(lambda: whole.pull(into))()
        for placed in (whole, halves, whole_by_http, halves_by_http):
            for _ in range(2):  # both of a server's segments are made, and mapped
                placed.push()
                placed.pull(into)
        arms = {
            "memcpy": seconds_of(lambda: np.copyto(into, source)),
            "memory": seconds_of(lambda: whole.pull(into)),
            "memory, 2 shards": seconds_of(lambda: halves.pull(into)),
            "http": seconds_of(lambda: whole_by_http.pull(into)),
            "http, 2 shards": seconds_of(lambda: halves_by_http.pull(into)),
            "broadcast": seconds_of(broadcast),
            "push": seconds_of(whole.push),
            "push, 2 shards": seconds_of(halves.push),
            "push by http": seconds_of(whole_by_http.push),
            "push by http, 2 shards": seconds_of(halves_by_http.push),
        }
        timings = paired(arms, rounds=rounds)
        sender.send(False)
    rendezvous.close()
    ratios = {arm: timings.ratio(arm, "memcpy") for arm in arms if arm != "memcpy"}
    sharded = {arm: timings.ratio(f"{arm}, 2 shards", arm) for arm in ("memory", "http", "push", "push by http")}
    gigabytes = {arm: layout.num_bytes / timings.median(arm) / 1e9 for arm in arms}
    record = {
        "num_bytes": layout.num_bytes,
        "ratio_to_memcpy": {arm: ratio.as_dict() for arm, ratio in ratios.items()},
        "ratio_of_two_shards_to_one": {arm: ratio.as_dict() for arm, ratio in sharded.items()},
        "broadcast_over_memory": timings.ratio("broadcast", "memory").as_dict(),
        "broadcast_over_http": timings.ratio("broadcast", "http").as_dict(),
        "gigabytes_per_s": gigabytes,
        "first_pull_s": first,
        **timings.as_dict(),
    }
    return ratios, record


@final
class _Trainer:
    """A trainer, its servers, each with a shard, and an engine's puller."""

    def __init__(
        self, layout: WeightLayout, source: np.ndarray[Any, Any], urls: list[str], *, shared_memory: bool
    ) -> None:
        self._layout = layout
        self._source = source
        self._placement = Uploader(urls, shards=len(urls), token=None, shared_memory=shared_memory)
        self._puller = WeightPuller(token=None, shared_memory=shared_memory)
        self._version = 0
        self.push()

    def push(self) -> None:
        """Put the bytes there as the next version."""
        self._version += 1
        publication = Publication(
            version=self._version,
            epoch=1,
            layout=self._layout,
            weights=self._weights,
            engines=(),
            membership=0,
            timeout_s=_PATIENCE_S,
        )
        self._placed = self._placement.upload(publication, {}, deadline=time.monotonic() + _PATIENCE_S)

    def pull(self, into: np.ndarray[Any, Any]) -> None:
        """Fetch the newest."""
        sources = self._placed.sources
        ranges = self._layout.shards(len(sources), self._placed.bucket_bytes)
        order = PullOrder(
            shards=tuple(Shard(urls, tuple(held)) for urls, held in zip(sources, ranges, strict=True)),
            epoch=1,
            version=self._version,
            digest=self._placed.digest,
            deadline=time.monotonic() + _PATIENCE_S,
            given_up=threading.Event(),
        )
        self._puller.fetch(order, into=into)

    def close(self) -> None:
        """Close the connections."""
        self._placement.close()

    def _weights(self) -> Iterator[tuple[str, Any]]:
        at = 0
        for spec in self._layout.parameters:
            yield spec.name, self._source[at : at + spec.num_bytes].view(np.float32).reshape(spec.shape)
            at += spec.num_bytes


def _url(server: Connection) -> str:
    if not server.poll(_PATIENCE_S):
        raise RuntimeError(f"the parameter server did not start within {_PATIENCE_S:g} s")
    return f"http://127.0.0.1:{server.recv()}"


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
        for arm, two in record["ratio_of_two_shards_to_one"].items():
            rows.append(Row(f"{megabytes} MB: {arm}, 2 shards ÷ 1", f"{Interval(**two)}"))
        for arm, ratio in ratios.items():
            rows.append(Row(f"{megabytes} MB: {arm} ÷ memcpy", f"{ratio}   ({speeds[arm]:.2f} GB/s)"))
    print_table("parameter_server: fetching weights against copying them", rows)
    if not quick:
        write_record("parameter_server", payload)
    return payload


if __name__ == "__main__":
    run(quick="--quick" in sys.argv)
