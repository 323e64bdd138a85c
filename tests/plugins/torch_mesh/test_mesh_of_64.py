"""Tests of one process of many; torch's `fake` process group stands in for the other processes, and never waits.

The fake group moves no data, so values are meaningless; `test_mesh.py` compares values of real processes.
"""

from contextlib import contextmanager
from typing import final

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipelinerl.plugins.torch_mesh import joining, sharded_model
from pipelinerl.plugins.torch_mesh.leader import grouped_parameters
from pipelinerl.plugins.torch_mesh.mesh_worker import MeshWorker
from pipelinerl.trainers.torch.loading import load
from pipelinerl.trainers.torch.mesh import ProcessMesh
from pipelinerl.trainers.torch.options import options_of
from pipelinerl.weights.torch_transfer import HostStream
from tests.fakes.torch_rank0 import OBJECTIVE, spec_of
from trainer_contract.types import ParameterInfo

MESH = ProcessMesh(dp_replicate=2, dp_shard=8, cp=4)


@pytest.fixture
def model(model_path):
    """Create the model before this process joins the group, since transformers then lets only the first rank write."""
    return model_path("qwen3")


@contextmanager
def joined(rank, size):
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        sharded_model.device_mesh.cache_clear()
        sharded_model.sequence_group.cache_clear()


@contextmanager
def worker_of(model, rank, size, **fields):
    """Start one process's worker of a model that is divided over `size` processes."""
    options = options_of({"mesh": {"dp_shard": size}})
    with joined(rank, size), pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_world", joining.TorchWorld(rank, dist.group.WORLD, frozenset(), (0,) * size))
        yield MeshWorker.started(spec_of(model, {}, **fields), options)


@final
class CountingStream:
    """A fake GPU stream; tests count the work queued on the default stream in `queued`."""

    overlaps = True

    def __init__(self):
        self.queued = 0
        self.awaited = 0
        self._start = None

    def __enter__(self):
        self.awaited = self.queued if self._start is None else self._start
        return self

    def __exit__(self, *_):
        return None

    def mark_start(self):
        self._start = self.queued

    def to_host(self, data):
        return HostStream().to_host(data)


def test_each_parameter_is_gathered_once_and_each_row_belongs_to_one_of_64_processes(model):
    """Each gathering command stays within its limit or has one parameter, and each row belongs to one process."""
    weights = load(spec_of(model, {})).weights
    layout = [ParameterInfo(name, tuple(each.shape), "float32") for name, each in weights.items()]
    sizes = {name: each.numel() for name, each in weights.items()}
    for most in (max(sizes.values()), 1000):
        bunches = list(grouped_parameters(layout, most))
        assert [info for bunch in bunches for info in bunch] == layout and len(bunches) < len(layout)
        assert all(len(bunch) == 1 or sum(sizes[info.name] for info in bunch) <= most for bunch in bunches)
    for info in layout:
        rows = [MESH.rows_of(rank, info.shape[0]) for rank in range(MESH.shards)]
        assert [row for each in rows for row in range(info.shape[0])[each]] == list(range(info.shape[0]))


@pytest.mark.timeout(300)
def test_reads_wait_for_writes_to_the_shards_and_not_for_the_passes_queued_after_them(model, monkeypatch):
    stream = CountingStream()
    monkeypatch.setattr(sharded_model, "stream_for", lambda device: stream)

    def awaited(worker):
        with worker.model.last_step_shards():
            return stream.awaited

    def rows_of(worker, name):
        stream.queued += 1
        return torch.zeros_like(worker.model.shards[name])

    with worker_of(model, 1, 2) as worker:
        names = worker.base_names
        with worker.model.lent(names, lambda name: rows_of(worker, name)):
            stream.queued += 100
            assert awaited(worker) == len(names), "the given weights are in place, the passes are not awaited"
        assert awaited(worker) == len(names) + 100, "the own weights come back after the passes"
        worker.backward([], 1, OBJECTIVE)
        stream.queued = 1000
        worker.optimizer_step(1e-3)
        stream.queued += 100
        assert awaited(worker) == 1000, "the optimizer step is awaited, the passes after it are not"


@pytest.mark.timeout(300)
def test_process_without_rows_takes_optimizer_steps(model):
    """Eight of nine processes hold all rows: the model's parameters have 8, 16, 32 or 48."""
    with worker_of(model, 8, 9) as worker:
        assert not any(shard.numel() for shard in worker.model.shards.values())
        worker.backward([], 1, OBJECTIVE)
        assert worker.optimizer_step(1e-3).model_version == 1
