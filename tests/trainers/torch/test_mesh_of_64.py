"""Tests of one process of 64; torch's `fake` process group stands in for the other processes, and never waits.

The fake group moves no data, so values are meaningless; `test_mesh.py` compares values of real processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from pipelinerl.trainers.torch import sharded_model
from pipelinerl.trainers.torch.leader import grouped_parameters
from pipelinerl.trainers.torch.loading import load
from pipelinerl.trainers.torch.mesh import ProcessMesh
from pipelinerl.trainers.torch.passes import PassSetting, evaluate
from pipelinerl.trainers.torch.sharded_model import ShardedModel
from tests.fakes.torch_rank0 import OBJECTIVE, batches, spec_of
from trainer_contract.types import ParameterInfo

MESH = ProcessMesh(dp_replicate=2, dp_shard=8, cp=4)
RANK = 5


@pytest.fixture
def model(model_path: Callable[[str], Path]) -> Path:
    """Create the model before this process joins the group, since transformers then lets only the first rank write."""
    return model_path("qwen3")


@pytest.fixture
def rank(model: Path) -> Iterator[int]:
    """Join a group of 64 for the duration of a test."""
    dist.init_process_group("fake", rank=RANK, world_size=MESH.size, store=FakeStore())
    try:
        yield RANK
    finally:
        dist.destroy_process_group()
        sharded_model.device_mesh.cache_clear()
        sharded_model.sequence_group.cache_clear()


@pytest.mark.timeout(300)
def test_one_of_64_processes_computes_forward_and_backward_over_its_rows(rank: int, model: Path) -> None:
    loaded = load(spec_of(model, {}))
    divided = ShardedModel(loaded.model, MESH, device=torch.device("cpu"), compute=torch.float32)
    shapes = divided.shapes
    assert divided.group is not None and (divided.group.size, divided.group.place) == (4, 1)
    for name, shard in divided.shards.items():
        rows = MESH.rows_of(rank, shapes[name][0])
        assert shard.shape == (rows.stop - rows.start, *shapes[name][1:]), name
    divided.begin_backward(is_last=True)
    setting = PassSetting(torch.device("cpu"), group=divided.group)
    loss, stats = evaluate(divided, setting, batches(0, 1)[0], OBJECTIVE)
    loss.backward()
    assert stats.predictions.shape == (batches(0, 1)[0].num_tokens,)
    gradient = divided.collect_gradient()
    assert {id(shard) for shard in gradient} == {id(shard) for shard in divided.shards.values() if shard.numel()}
    assert all(shard.grad is not None and shard.grad.shape == shard.shape for shard in gradient)
    divided.discard_gradient()


def test_each_parameter_is_gathered_once_and_each_row_belongs_to_one_of_64_processes(model: Path) -> None:
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
