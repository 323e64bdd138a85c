"""Tests of rows of a trainer state that are written by one number of processes and read by another number."""

import json

import pytest
import torch

from pipelinerl.trainers.torch.mesh import ProcessMesh
from pipelinerl.trainers.torch.state import VALUE, ShardFiles, key_of, write_index, write_shard
from trainer_contract.errors import StateError

KINDS = (VALUE, "exp_avg")
#: Shapes with fewer rows than there are processes, as many rows, and more rows; `d` is a vector.
SHAPES = {"a": (3, 5), "b": (64, 2), "c": (129, 3), "d": (48,)}


def written(path, processes):
    """Write random tensors from this number of processes; return them whole, by key."""
    draw = torch.Generator().manual_seed(0)
    whole = {key_of(name, kind): torch.rand(shape, generator=draw) for name, shape in SHAPES.items() for kind in KINDS}
    mesh = ProcessMesh(dp_shard=processes)
    for rank in range(processes):
        rows = {key: each[mesh.rows_of(rank, len(each))].contiguous() for key, each in whole.items()}
        write_shard(path, rank, processes, {key: each for key, each in rows.items() if each.numel()})
    write_index(path, processes, {name: torch.Size(shape) for name, shape in SHAPES.items()})
    return whole


@pytest.mark.parametrize(("saved", "loaded"), [(1, 4), (2, 3), (4, 1), (3, 64), (64, 2), (64, 64)])
def test_state_shards_load_on_any_number_of_processes(saved, loaded, tmp_path):
    whole, files = written(tmp_path, saved), ShardFiles.of(tmp_path)
    assert files is not None
    files.check({name: torch.Size(shape) for name, shape in SHAPES.items()})
    mesh = ProcessMesh(dp_shard=loaded)
    for name, (length, *_) in SHAPES.items():
        for kind in KINDS:
            expected = whole[key_of(name, kind)]
            parts = [files.rows(name, kind, mesh.rows_of(rank, length)) for rank in range(loaded)]
            assert torch.equal(torch.cat(parts), expected)
            assert [part.shape[1:] for part in parts] == [expected.shape[1:]] * loaded


def test_missing_or_damaged_state_shards_are_rejected(tmp_path):
    written(tmp_path, 2)
    folder = tmp_path / "shards"
    files = ShardFiles.of(tmp_path)
    assert files is not None
    with pytest.raises(StateError, match="are not those of this model"):
        files.check({"a": torch.Size((3, 5))})
    shard = folder / "00002-of-00002.safetensors"
    data = shard.read_bytes()
    shard.write_bytes(data[:-1])
    with pytest.raises(StateError, match="missing or damaged"):
        files.rows("c", VALUE, slice(0, 129))
    shard.write_bytes(data)
    index = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(index | {"shapes": index["shapes"] | {"c": [140, 3]}}))
    longer = ShardFiles.of(tmp_path)
    assert longer is not None
    with pytest.raises(StateError, match=r"the rows of 'c' .* are incomplete"):
        longer.rows("c", VALUE, slice(0, 140))
    (folder / "index.json").write_text('{"shards": 2}')
    with pytest.raises(StateError, match="missing or damaged"):
        ShardFiles.of(tmp_path)
    shard.unlink()
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(StateError, match=r"lacks 00002-of-00002\.safetensors"):
        ShardFiles.of(tmp_path)
