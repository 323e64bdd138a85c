"""The layout of weights in transfer is made from a trainer's parameters; digests and descriptions of its parts."""

import threading
import time

import numpy as np
import pytest
import xxhash
from hypothesis import given, strategies as st

from pipelinerl.errors import UpdateError
from pipelinerl.weights.layout import WeightDigest
from pipelinerl.weights.publisher import wire_layout
from trainer_contract.types import ParameterInfo


def test_error_for_a_parameter_of_an_unsupported_dtype_names_the_parameter():
    with pytest.raises(UpdateError, match=r"parameter 'd' must have one of the dtypes .* got 'int64'"):
        wire_layout([ParameterInfo("d", (1,), "int64")])


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_digest_of_weights_does_not_depend_on_how_the_bytes_are_split(data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    digest = WeightDigest()
    for start, end in zip(edges, edges[1:], strict=False):  # noqa: RUF007
        digest.update(memoryview(data)[start:end])
    assert digest.hexdigest() == xxhash.xxh3_128(data).hexdigest()


def test_other_threads_run_while_weights_are_hashed():
    """While one thread hashes 256 MB, which takes 20 ms, another thread is never blocked for nearly that long."""
    data, ticks, stop = np.zeros(2**28, np.uint8), 0, threading.Event()

    def tick():
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
