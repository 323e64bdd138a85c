"""The buffer into which weights are pulled: parts in any order, from several threads, on host or device."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import xxhash

from pipelinerl.plugins.parameter_server.shared_memory import ReceiveBuffer

DATA = (np.arange(1000) * 7919 % 251).astype(np.uint8)
DIGEST = xxhash.xxh3_128(DATA.tobytes()).hexdigest()


class OnDevice:
    """A fake device tensor: it has no host memory, and accepts copies into its slices."""

    device = "cuda:0"

    def __init__(self):
        self.memory = torch.zeros(len(DATA), dtype=torch.uint8)

    def __len__(self):
        return len(self.memory)

    def __getitem__(self, part):
        return self.memory[part]

    def numpy(self):
        raise TypeError("a device tensor has no numpy view")


def land(received, part):
    memory = received.memory(part)
    memory[:] = DATA[part[0] : part[1]]
    received.landed(part, memory)


@pytest.mark.parametrize("part_bytes", [17, 64, 333, 1000, 5000])
@pytest.mark.parametrize("order", ["forwards", "backwards", "inside out"])
@pytest.mark.parametrize("into", [np.zeros, torch.zeros, OnDevice], ids=["numpy", "torch", "device"])
def test_parts_of_weights_received_in_any_order_give_the_same_bytes_and_digest(into, order, part_bytes):
    buffer = OnDevice() if into is OnDevice else into(len(DATA), dtype=np.uint8 if into is np.zeros else torch.uint8)
    came = []
    received = ReceiveBuffer(buffer, shards=[[(0, len(DATA))]], on_progress=came.append)
    parts = received.missing(0, part_bytes=part_bytes)
    assert [parts[0][0], parts[-1][1]] == [0, len(DATA)]
    middle = len(parts) // 2
    turned = {"forwards": parts, "backwards": parts[::-1], "inside out": parts[middle:] + parts[:middle]}[order]
    for number, part in enumerate(turned):
        assert received.missing(0, part_bytes=part_bytes) == [other for other in parts if other not in turned[:number]]
        land(received, part)
    assert received.missing(0, part_bytes=part_bytes) == [] and received.digest() == DIGEST
    assert bytes(getattr(buffer, "memory", buffer)) == DATA.tobytes()
    assert came == sorted(came) and came[-1] == len(DATA)


def test_parts_of_weights_received_by_many_threads_give_the_same_bytes_and_digest():
    for _ in range(20):
        buffer = np.zeros(len(DATA), np.uint8)
        received = ReceiveBuffer(buffer, shards=[[(0, 400), (700, 1000)], [(400, 700)]], on_progress=lambda _: None)
        parts = received.missing(0, part_bytes=3) + received.missing(1, part_bytes=5)
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda part, made=received: land(made, part), parts))
        assert received.digest() == DIGEST and np.array_equal(buffer, DATA)
