"""The digest depends only on the bytes, not on chunks or the array library."""

from __future__ import annotations

import threading
import time

import numpy as np
import torch
import xxhash
from hypothesis import given, strategies as st

from pipelinerl.weights.digest import WeightDigest


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_any_split_gives_the_same_digest(data: bytes, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    digest = WeightDigest()
    for start, end in zip(edges, edges[1:], strict=False):  # noqa: RUF007
        digest.update(memoryview(data)[start:end])
    assert digest.hexdigest() == xxhash.xxh3_128(data).hexdigest()


def test_numpy_and_torch_give_the_same_digest_across_chunks() -> None:
    data = np.arange(3 * 2**20 + 17, dtype=np.uint64).view(np.uint8)
    ours, theirs = WeightDigest(), WeightDigest()
    ours.update(data)
    theirs.update(torch.from_numpy(data))
    assert ours.hexdigest() == theirs.hexdigest() == xxhash.xxh3_128(memoryview(data)).hexdigest()


def test_other_threads_run_while_hashing() -> None:
    """Hashing 256 MB in one thread blocks another for much less than the 20 ms that it takes."""
    data, ticks, stop = np.zeros(2**28, np.uint8), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not stop.is_set():
            ticks += 1
            time.sleep(0.0005)

    other = threading.Thread(target=tick)
    other.start()
    digest = WeightDigest()
    for _ in range(4):
        digest.update(data)
    stop.set()
    other.join()
    assert ticks > 10
