"""How even the parts of a mesh are, and what one process of 64 does by itself: no other process, no wire.

    balance     the part with most work ÷ the mean of all: each by itself, and in lock-step, where each round lasts as
                long as its longest micro-batch. Heavy-tailed lengths in groups of eight, twenty draws
    one of 64   2 copies × 8 shards × 4 that share tokens, the other 63 played by torch's `fake` group, which moves
                nothing: seconds to divide the model, to go forward and back, to plan a gather (which rows come from
                whom, of every parameter), and to write all 32 shards of a state and read the rows of 24 processes

What the fake group computes means nothing; `tests/trainers/torch/test_mesh_of_64.py` checks its shapes.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import Row, print_table, write_record
from pipelinerl.models.tiny_decoder import DebugSize, random_decoder
from pipelinerl.objective.presets import resolve
from pipelinerl.rng import generator
from pipelinerl.trainers.torch.leader import grouped_parameters
from pipelinerl.trainers.torch.loading import load
from pipelinerl.trainers.torch.mesh import ProcessMesh
from pipelinerl.trainers.torch.passes import PassSetting, evaluate
from pipelinerl.trainers.torch.shard_files import VALUE, ShardFiles, write_index, write_shard
from pipelinerl.trainers.torch.sharded_model import ShardedModel
from pipelinerl.training.rollouts.packing import bins_of, work
from trainer_contract.types import Device, MicroBatch, ParameterInfo, TrainerSpec

dist: Any = torch.distributed
_MESH: Final = ProcessMesh(dp_replicate=2, dp_shard=8, cp=4)
_RANK, _READERS = 5, 24
_ALONE, _LOCK_STEP = 1.005, 1.05
_ROLLOUTS, _GROUP, _BUDGET = 512, 8, 16384


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    draws = 3 if quick else 20
    even = {width: [balance(width, seed) for seed in range(draws)] for width in (2, 4)}
    alone = {width: max(each for each, _ in found) for width, found in even.items()}
    lock_step = {width: float(np.median([each for _, each in found])) for width, found in even.items()}
    with tempfile.TemporaryDirectory() as folder:
        seconds = one_of_64(Path(folder), DebugSize.MB_3 if quick else DebugSize.MB_310)
    print_table(
        "parts of a mesh",
        [
            *(
                Row(f"{width} parts ÷ ideal, each by itself, at most", each, "<= 1.005", each <= _ALONE)
                for width, each in alone.items()
            ),
            *(
                Row(f"{width} parts ÷ ideal, in lock-step, median", each, "<= 1.05", each <= _LOCK_STEP)
                for width, each in lock_step.items()
            ),
            *(Row(f"one of 64: {name}, s", each) for name, each in seconds.items()),
        ],
    )
    found = {"alone": alone, "lock_step": lock_step, "one_of_64_s": seconds}
    write_record("mesh_plans", {"quick": quick, **{name: _by_word(each) for name, each in found.items()}})
    return found


def balance(width: int, seed: int) -> tuple[float, float]:
    """Most work ÷ mean, of each part by itself and in lock-step."""
    lengths = np.clip(generator(seed, "lengths").lognormal(6.5, 1.0, _ROLLOUTS), 16, 8192).astype(int).tolist()
    prompts = [number // _GROUP for number in range(_ROLLOUTS)]
    bins = bins_of(lengths, prompts, token_budget=_BUDGET, width=width)
    loads = np.zeros(-(-len(bins) // width) * width)
    loads[: len(bins)] = [sum(work(lengths[i]) for i in members) for members in bins]
    rounds = loads.reshape(-1, width)
    ideal = loads.sum() / width
    return float(rounds.sum(axis=0).max() / ideal), float(rounds.max(axis=1).sum() / ideal)


def one_of_64(folder: Path, size: DebugSize) -> dict[str, float]:
    """Seconds of each part."""
    random_decoder(size, seed=0).save_pretrained(folder / "model")
    loaded = load(TrainerSpec(model_path=folder / "model", device=Device.CPU))
    seconds: dict[str, float] = {}
    dist.init_process_group("fake", rank=_RANK, world_size=_MESH.size, store=FakeStore())
    try:
        device = torch.device("cpu")
        model: ShardedModel = _timed(
            seconds, "divide", lambda: loaded.divided(_MESH, rank=_RANK, device=device, compute=torch.float32)
        )
        setting, batch = PassSetting(device, group=model.group), _batch()
        loss, _ = _timed(seconds, "forward", lambda: evaluate(model, setting, batch, resolve("grpo")))
        model.begin_backward(is_last=True)
        _timed(seconds, "backward", loss.backward)
        _timed(seconds, "gather plan", lambda: _gather_plan(model))
        _timed(seconds, "32 shards written", lambda: _written(folder, model))
        _timed(seconds, f"rows of {_READERS} processes read", lambda: _read(folder, model))
    finally:
        dist.destroy_process_group()
    return seconds


def _gather_plan(model: ShardedModel) -> int:
    """How many messages rank 0 would wait for."""
    layout = [ParameterInfo(name, tuple(shape), "float32") for name, shape in model.shapes.items()]
    return sum(
        1
        for bunch in grouped_parameters(layout, model.at_once)
        for info in bunch
        for rank in range(1, _MESH.shards)
        if (rows := _MESH.rows_of(rank, info.shape[0])).stop > rows.start
    )


def _written(folder: Path, model: ShardedModel) -> None:
    for rank in range(_MESH.shards):
        rows = {name: _MESH.rows_of(rank, shape[0]) for name, shape in model.shapes.items()}
        own = {name: torch.full((r.stop - r.start, *model.shapes[name][1:]), float(rank)) for name, r in rows.items()}
        write_shard(folder, rank, _MESH.shards, own)
    write_index(folder, _MESH.shards, model.shapes)


def _read(folder: Path, model: ShardedModel) -> None:
    files, readers = ShardFiles.of(folder), ProcessMesh(dp_shard=_READERS)
    assert files is not None, "it was written"
    files.check(model.shapes)
    for name, shape in model.shapes.items():
        rows = [files.rows(name, VALUE, readers.rows_of(rank, shape[0])) for rank in range(_READERS)]
        if sum(len(each) for each in rows) != shape[0]:
            raise ValueError(f"expected {shape[0]} rows of {name}, got {[len(each) for each in rows]}")


def _batch() -> MicroBatch:
    """Eight rollouts of 64 tokens."""
    count, length = 512, 64
    positions = np.tile(np.arange(length, dtype=np.int32), count // length)
    mask, nothing = positions >= length // 4, np.zeros(count, np.float32)
    return MicroBatch(
        token_ids=generator(0, "mesh_plans").integers(0, 512, count).astype(np.int32),
        position_ids=positions,
        segment_ids=np.repeat(np.arange(count // length), length).astype(np.int32),
        loss_mask=mask,
        advantages=mask.astype(np.float32),
        weights=(mask / count).astype(np.float32),
        behavior_logprobs=nothing,
        temperatures=np.ones(count, np.float32),
        num_segments=count // length,
    )


def _timed(seconds: dict[str, float], name: str, part: Callable[[], Any]) -> Any:
    start = time.perf_counter()
    found = part()
    seconds[name] = time.perf_counter() - start
    return found


def _by_word(figures: Any) -> dict[str, float]:
    return {str(name): figure for name, figure in figures.items()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer draws")
    run(quick=parser.parse_args().quick)
