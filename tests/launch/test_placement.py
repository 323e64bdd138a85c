"""Placements of a run's processes on 0, 1, 2, 4 and 8 GPUs equal the golden files; impossible ones are rejected.

`PIPELINERL_WRITE_GOLDEN=1 python -m pytest tests/launch/test_placement.py` rewrites the golden files; read the
difference before you keep it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from launch.hosts import LOCALHOST, Devices, VisibleDevice
from launch.placement import place
from launch.plan import Launch, processes_of
from pipelinerl.errors import RecipeError
from tests.launch.config import config_of

GOLDEN = Path(__file__).with_name("golden")
RUN = Path("/runs/x")

RECIPES: dict[str, dict[str, dict[str, object]]] = {
    "torch_1": {"engine": {"type": "torch"}},
    "torch_2": {"engine": {"type": "torch", "count": 2}},
    "torch_3": {"engine": {"type": "torch", "count": 3}},
    "torch_4": {"engine": {"type": "torch", "count": 4}},
    "vllm_tp2": {"engine": {"type": "vllm", "devices": 2}},
    "vllm_tp2_twice": {"engine": {"type": "vllm", "devices": 2, "count": 2}},
    "jax_mesh": {"engine": {"type": "jax"}, "trainer": {"type": "jax", "options": {"mesh": {"data": 2, "fsdp": 2}}}},
    "jax_on_cpu": {"engine": {"type": "jax", "device": "cpu"}},
    "servers": {"engine": {"type": "vllm_server", "servers": ["http://127.0.0.1:1"]}},
    "shared": {
        "engine": {"count": 2, "memory_share": 0.25},
        "trainer": {"memory_share": 0.4},
        "launch": {"engine_devices": [[0], [0]], "trainer_devices": [0]},
    },
    "shared_in_part": {
        "engine": {"type": "vllm", "devices": 2},
        "launch": {"engine_devices": [[0, 1]], "trainer_devices": [1]},
    },
    "shared_with_several": {
        "engine": {"type": "vllm", "devices": 2, "count": 3},
        "launch": {"engine_devices": [[0, 1], [0, 2], [0, 3]], "trainer_devices": [1]},
    },
    "explicit": {
        "engine": {"type": "vllm", "devices": 2, "count": 2},
        "launch": {"engine_devices": [[0, 1], [2, 3]], "trainer_devices": [4]},
    },
    "explicit_engines": {"engine": {"count": 2}, "launch": {"engine_devices": [[1], [0]]}},
    "explicit_trainer": {"engine": {"count": 2}, "launch": {"trainer_devices": [0]}},
    "cpu": {"engine": {"device": "cpu"}, "trainer": {"device": "cpu"}},
    "cuda": {"engine": {"device": "cuda"}, "trainer": {"device": "cuda"}},
    "nccl": {"weights": {"backend": "nccl"}},
}


def gpus(count):
    return Devices(tuple(VisibleDevice(str(index), 81559) for index in range(count)))


def written(config, devices):
    """Return one line for each process in the launch plan, with its devices, or the reason why there is no plan."""
    host = replace(LOCALHOST, devices=devices)
    try:
        launch = Launch.on([host], config, run_dir=RUN, ports=count(5000), cores=range(64), python="py")
    except RecipeError as error:
        return [f"refused: {error}"]
    return [f"check: {launch.placement.describe()}", *map(_line, processes_of(launch).specs)]


def _line(spec):
    ours = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "JAX_PLATFORMS")
    words = [f"{name}={spec.env[name]}" for name in ours if name in spec.env]
    words += [spec.argv[at + 1] for at, word in enumerate(spec.argv) if word == "--set"]
    return f"{spec.name:<12} {' '.join(words)}".rstrip()


@pytest.mark.parametrize("name", RECIPES)
def test_gpu_placements_match_the_golden_files(name):
    config = config_of(**RECIPES[name])
    parts = [f"# GPUs: {count}\n" + "\n".join(written(config, gpus(count))) + "\n" for count in (0, 1, 2, 4, 8)]
    text = "\n".join(parts)
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("PIPELINERL_WRITE_GOLDEN"):
        file.write_text(text)
    assert file.read_text() == text


@pytest.mark.parametrize("count", [1, 2, 4, 8])
@pytest.mark.parametrize("name", RECIPES)
def test_gpus_are_never_assigned_beyond_their_capacity(name, count):
    """A process without a memory share has its devices to itself; the shares on a device sum to at most 1."""
    try:
        placement = place(config_of(**RECIPES[name]), gpus(count))
    except RecipeError:
        return
    for index in range(count):
        here = [each.share for each in placement.assignments.values() if index in each.indices]
        assert len(here) <= 1 or sum(1.0 if share is None else share for share in here) <= 1.0 + 1e-9


def test_gpu_memory_limit_of_a_process_is_its_share_of_the_devices_memory():
    alone, shared = (place(config_of(), gpus(count)) for count in (2, 1))
    assert alone.bytes_of("trainer") == 81559 * 2**20
    assert shared.bytes_of("trainer") == int(81559 * 2**20 * 0.45)
    assert place(config_of(), Devices((VisibleDevice("0"),))).bytes_of("trainer") is None


def test_processes_get_gpus_by_the_names_in_the_launchers_cuda_visible_devices():
    devices = Devices((VisibleDevice("3"), VisibleDevice("GPU-aa"), VisibleDevice("MIG-bb")), chosen_by_user=True)
    assert written(config_of(engine={"count": 2}), devices) == [
        "check: engine-0 on GPU 0 (3), engine-1 on GPU 1 (GPU-aa), trainer on GPU 2 (MIG-bb)",
        "redis",
        "controller",
        "engine-0     CUDA_VISIBLE_DEVICES=3",
        "engine-1     CUDA_VISIBLE_DEVICES=GPU-aa",
        "trainer      CUDA_VISIBLE_DEVICES=MIG-bb",
        "actor-0",
    ]
    with pytest.raises(RecipeError, match=r"5 GPUs are needed, .*, and there are 3, as CUDA_VISIBLE_DEVICES says"):
        place(config_of(engine={"count": 4}), devices)
