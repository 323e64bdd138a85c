"""A real parameter server, in this process or in a process that a test can kill, and weights to store on it.

python -m tests.fakes.parameter_server [port [place]]      prints its port, serves until it is killed
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import httpx
import numpy as np
from numpy.typing import NDArray

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl import rng
from pipelinerl.plugins.parameter_server.download import WeightPuller
from pipelinerl.plugins.parameter_server.server import ParameterServer, create_app
from pipelinerl.plugins.parameter_server.version_table import SnapshotStore, VersionTable
from pipelinerl.system.http_service import listen, serve
from pipelinerl.weights.layout import WeightDigest
from pipelinerl.weights.publisher import Publication
from pipelinerl.weights.pull import PullOrder, Shard
from tests.patience import PATIENCE_S

TOKEN = "secret"

#: The sizes are odd, so that boundaries of shards, buckets and parameters never coincide.
LAYOUT = WeightLayout(
    parameters=(
        ParameterSpec(name="embed", shape=(1031, 523), dtype=DType.FLOAT32),
        ParameterSpec(name="scale", shape=(7,), dtype=DType.FLOAT16),
        ParameterSpec(name="head", shape=(523, 1031), dtype=DType.FLOAT32),
    )
)


def application(place: str | None = None, *, room: int = 3, token: str | None = TOKEN) -> Any:
    """Return the ASGI application of a server that holds `room` versions, and saves them to `place`, if given."""
    store = None if place is None else SnapshotStore(place)
    return create_app(
        ParameterServer(VersionTable(room=room), puller=WeightPuller(token=token), store=store), token=token
    )


def weights(version: int, layout: WeightLayout = LAYOUT) -> Callable[[], Iterator[tuple[str, Any]]]:
    """Return the parameters of a version; they depend only on the version and the layout."""

    def source() -> Iterator[tuple[str, Any]]:
        at, data = 0, flat(version, layout)
        for spec in layout.parameters:
            part = data[at : at + spec.num_bytes].copy()
            yield spec.name, part.view(spec.dtype.value).reshape(spec.shape)
            at += spec.num_bytes

    return source


@cache
def flat(version: int, layout: WeightLayout = LAYOUT) -> NDArray[np.uint8]:
    """Return the bytes of a version as they are sent. The bytes are cached, so do not change them."""
    arrays = [
        rng.generator(version, spec.name).standard_normal(size=spec.shape, dtype=np.float32).astype(spec.dtype.value)
        for spec in layout.parameters
    ]
    return np.concatenate([array.reshape(-1).view(np.uint8) for array in arrays])


@cache
def digest(version: int, layout: WeightLayout = LAYOUT) -> str:
    made = WeightDigest()
    made.update(flat(version, layout))
    return made.hexdigest()


def publication(version: int, engines: tuple[str, ...] = (), **fields: Any) -> Publication:
    layout = fields.get("layout", LAYOUT)
    defaults = {"epoch": 1, "membership": 1, "layout": layout, "weights": weights(version, layout), "timeout_s": 24.0}
    return Publication(version=version, engines=engines, **(defaults | fields))


def order(version: int, *sources: str, layout: WeightLayout = LAYOUT, timeout_s: float = 8.0) -> PullOrder:
    """Return an order to pull a version from `sources`, each of which holds the whole version."""
    return sharded(version, (sources,), layout=layout, timeout_s=timeout_s)


def sharded(
    version: int,
    sources: tuple[tuple[str, ...], ...],
    *,
    bucket_bytes: int = 2**20,
    layout: WeightLayout = LAYOUT,
    timeout_s: float = 8.0,
) -> PullOrder:
    """Return an order to pull a version in shards; each item of `sources` lists the servers of one shard."""
    ranges = layout.shards(len(sources), bucket_bytes)
    return PullOrder(
        shards=tuple(Shard(urls, tuple(held)) for urls, held in zip(sources, ranges, strict=True)),
        epoch=1,
        version=version,
        digest=digest(version, layout),
        deadline=time.monotonic() + timeout_s,
        given_up=threading.Event(),
    )


def pulled(pull: PullOrder, layout: WeightLayout = LAYOUT, *, by_memory: bool = True) -> NDArray[np.uint8]:
    into = np.zeros(layout.num_bytes, np.uint8)
    assert WeightPuller(token=TOKEN, shared_memory=by_memory).fetch(pull, into=into) == pull.digest
    return into


def soon() -> float:
    return time.monotonic() + PATIENCE_S


def state(url: str) -> dict[str, Any]:
    deadline = soon()
    while True:
        try:
            answer = httpx.get(url + "/versions", headers={"authorization": f"Bearer {TOKEN}"}, trust_env=False)
            return dict(answer.raise_for_status().json())
        except httpx.HTTPError:
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)


def held(url: str) -> list[tuple[int, int]]:
    return [(version["epoch"], version["version"]) for version in state(url)["versions"] if version["digest"]]


def wait_until_saved(url: str, key: tuple[int, int]) -> None:
    deadline = soon()
    while state(url)["saved"] != list(key):
        assert time.monotonic() < deadline, f"{key} was not saved"
        time.sleep(0.02)


if __name__ == "__main__":
    port, place, *_ = *sys.argv[1:], *("0", "")[len(sys.argv) - 1 :]
    with listen("127.0.0.1", int(port)) as bound:
        print(bound.getsockname()[1], flush=True)
        serve(application(place or None), bound)
