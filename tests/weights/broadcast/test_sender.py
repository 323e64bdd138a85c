"""The sender of weights reads each parameter once, from any array library, and compares it with the layout."""

import time

import numpy as np
import pytest
import torch
import xxhash

from inference_contract.weights import DType, ParameterSpec, WeightLayout
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.weights.broadcast.collective import Rendezvous
from pipelinerl.weights.broadcast.sender import WeightSender
from tests.fakes.groups import ranks
from tests.patience import PATIENCE_S, SOON_S

LAYOUT = WeightLayout(
    parameters=(
        ParameterSpec(name="a", shape=(3, 5), dtype=DType.FLOAT32),
        ParameterSpec(name="b", shape=(), dtype=DType.FLOAT64),
        ParameterSpec(name="c", shape=(7,), dtype=DType.INT8),
    )
)
ARRAYS = {
    "a": np.arange(15, dtype=np.float32).reshape(3, 5),
    "b": np.array(2.5),
    "c": np.arange(7, dtype=np.int8),
}
EXPECTED = xxhash.xxh3_128(b"".join(array.tobytes() for array in ARRAYS.values())).hexdigest()


class _DLPack:
    """An array of another library than numpy and torch, which can only be read through DLPack."""

    def __init__(self, array):
        self._tensor = torch.from_numpy(array)
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack__(self, **options):
        return self._tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._tensor.__dlpack_device__()


def _send(items, *, layout=LAYOUT, bucket_bytes=10):
    def source():
        yield from items

    return WeightSender(layout, source, bucket_bytes).send(None, deadline=time.monotonic() + PATIENCE_S)


def _fortran(array):
    return array.copy(order="F")


def _read_only(array):
    frozen = array.copy()
    frozen.flags.writeable = False
    return frozen


@pytest.mark.parametrize(
    "kind",
    [np.asarray, torch.from_numpy, _DLPack, _read_only, _fortran],
    ids=["numpy", "torch", "dlpack", "read_only", "fortran"],
)
@pytest.mark.parametrize("bucket_bytes", [1, 70, 10**6])
def test_sent_weights_have_the_same_bytes_from_every_array_library(kind, bucket_bytes):
    assert _send([(name, kind(array)) for name, array in ARRAYS.items()], bucket_bytes=bucket_bytes) == EXPECTED


@pytest.mark.parametrize(
    ("dtype", "tensor"),
    [
        (DType.BFLOAT16, torch.linspace(-1, 1, 6, dtype=torch.bfloat16)),
        (DType.FLOAT32, torch.arange(6.0).reshape(3, 2).t().requires_grad_()),
    ],
    ids=["bfloat16", "not contiguous, with grad"],
)
def test_torch_parameter_is_sent_as_its_bytes_without_conversion(dtype, tensor):
    layout = WeightLayout(parameters=(ParameterSpec(name="w", shape=tuple(tensor.shape), dtype=dtype),))
    raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
    assert _send([("w", tensor)], layout=layout) == xxhash.xxh3_128(raw).hexdigest()


@pytest.mark.parametrize(
    ("items", "sentence"),
    [
        (list(ARRAYS.items())[:2], "it gathered None"),
        ([("b", ARRAYS["b"])], "must gather \\('a'"),
        ([("a", ARRAYS["a"].T)], "\\(5, 3\\)"),
        ([("a", ARRAYS["a"].astype(np.float64))], "float64"),
        ([*ARRAYS.items(), ("d", ARRAYS["c"])], "gathered 'd' after the last"),
    ],
)
def test_sender_rejects_parameters_that_differ_from_the_announced_layout(items, sentence):
    with pytest.raises(UpdateError, match=sentence):
        _send(items)


def test_sending_weights_to_a_rank_that_stays_silent_fails_after_the_silence_timeout():
    root, leaf = ranks(Rendezvous("127.0.0.1"))
    sender, began = WeightSender(LAYOUT, lambda: iter(ARRAYS.items()), 16), time.monotonic()
    with pytest.raises(DeadlineError, match=r"bucket \d of 2 \(parameter"):
        sender.send(root, deadline=began + PATIENCE_S, silence_s=0.3)
    assert sender.broke_in_group and time.monotonic() - began < SOON_S
    leaf.close()
