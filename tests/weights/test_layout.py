"""The layout of weights in transfer is made from a trainer's parameters; digests and descriptions of its parts."""

import threading
import time

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, strategies as st

from inference_contract.weights import DType
from pipelinerl.errors import UpdateError
from pipelinerl.weights.layout import WeightDigest, describe_bucket, parameters_in
from pipelinerl.weights.publisher import wire_layout
from trainer_contract.types import ParameterInfo

INFOS = (
    ParameterInfo("a", (2, 3), "float32"),
    ParameterInfo("b", (4,), "bfloat16"),
    ParameterInfo("c", (), "float64"),
)


def test_layout_of_weights_in_transfer_keeps_the_order_shape_and_dtype_of_parameters():
    layout = wire_layout(INFOS)
    assert [(p.name, p.shape, p.dtype) for p in layout.parameters] == [
        ("a", (2, 3), DType.FLOAT32),
        ("b", (4,), DType.BFLOAT16),
        ("c", (), DType.FLOAT64),
    ]
    assert layout.num_bytes == 24 + 8 + 8


def test_error_for_a_parameter_of_an_unsupported_dtype_names_the_parameter():
    with pytest.raises(UpdateError, match=r"parameter 'd' must have one of the dtypes .* got 'int64'"):
        wire_layout([ParameterInfo("d", (1,), "int64")])


def test_parameters_in_a_byte_range_are_those_whose_first_byte_is_in_the_range():
    layout = wire_layout(INFOS)
    assert [(p.name, offset) for p, offset in parameters_in(layout, 24, 40)] == [("b", 24), ("c", 32)]


def test_description_of_a_weight_bucket_contains_its_number_and_parameters():
    layout = wire_layout(INFOS)
    bounds = layout.buckets(24)
    assert describe_bucket(layout, 0, bounds) == "bucket 1 of 2 (parameter 'a')"
    assert describe_bucket(layout, 1, bounds) == "bucket 2 of 2 (parameters 'b' to 'c')"


@given(data=st.binary(max_size=300), cuts=st.lists(st.integers(0, 300), max_size=5))
def test_digest_of_weights_does_not_depend_on_how_the_bytes_are_split(data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    digest = WeightDigest()
    for start, end in zip(edges, edges[1:], strict=False):  # noqa: RUF007
        digest.update(memoryview(data)[start:end])
    assert digest.hexdigest() == xxhash.xxh3_128(data).hexdigest()


def test_weights_as_numpy_and_torch_arrays_have_the_same_digest():
    data = np.arange(3 * 2**20 + 17, dtype=np.uint64).view(np.uint8)
    ours, theirs = WeightDigest(), WeightDigest()
    ours.update(data)
    theirs.update(torch.from_numpy(data))
    assert ours.hexdigest() == theirs.hexdigest() == xxhash.xxh3_128(memoryview(data)).hexdigest()


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
