"""What it costs a torch trainer of two processes to start: the memory of either, and time.

    reading     a process makes the model without its weights, divides it, and reads its own rows of each parameter:
                measured on one of two whose other torch's `fake` group plays, since here nothing is sent
    all of it   with the pass over a few tokens that finds out whether the model can be packed, of two real processes:
                layers are gathered for it as for every pass, on a CPU in the host's memory

Reading is to take a process' half of the weights and a layer. A model that is loaded whole before it is divided takes
all of its bytes. Peaks are the kernel's (`VmHWM`), which Linux alone has, over what processes take after another model
of theirs; and what they drop the allocator gives back, which by itself keeps what a pass has gathered.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.measure import Row, print_table, write_record
from benchmarks.mesh_gather import GIVEN_BACK, Peak, other_rank
from pipelinerl.models.tiny_decoder import DebugSize, random_decoder
from pipelinerl.system.ports import free_ports
from pipelinerl.trainers.torch.loading import load
from pipelinerl.trainers.torch.mesh import ProcessMesh
from pipelinerl.trainers.torch.sharded_model import ShardedModel, device_mesh
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.types import Device, TrainerSpec

_RANKS: Final = 2
_MESH: Final = {"dp_shard": _RANKS}
#: glibc's name for the size from which on memory is of its own mapping.
_M_MMAP_THRESHOLD: Final = -3
dist: Any = torch.distributed


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, GIVEN_BACK)
    with tempfile.TemporaryDirectory() as folder:
        small, large = Path(folder) / "small", Path(folder) / "large"
        random_decoder(DebugSize.MB_3, seed=0).save_pretrained(small)
        random_decoder(DebugSize.MB_24 if quick else DebugSize.MB_310, seed=0).save_pretrained(large)
        found = {"quick": quick, "reading": _read(small, large), **_both(small, large)}
    _print(found)
    write_record("mesh_start", found)
    return found


def _read(small: Path, large: Path) -> int:
    """By how much one of two rises that reads its rows."""
    dist.init_process_group("fake", rank=0, world_size=_RANKS, store=FakeStore())
    try:
        _divided(small)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        own = Peak("self")
        _divided(large)
        return own.rise()
    finally:
        dist.destroy_process_group()
        device_mesh.cache_clear()


def _divided(path: Path) -> ShardedModel:
    loaded, device = load(TrainerSpec(model_path=path, device=Device.CPU)), torch.device("cpu")
    return loaded.divided(ProcessMesh(dp_shard=_RANKS), rank=0, device=device, compute=torch.float32)


def _both(small: Path, large: Path) -> dict[str, Any]:
    """By how much either of two processes rises that starts a trainer."""
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    options = {"mesh": _MESH, "distributed": {"coordinator": coordinator}}
    with other_rank(coordinator) as other:
        started(small, options).close()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        own, its = Peak("self"), Peak(other)
        began = time.monotonic()
        trainer = started(large, options)
        seconds = time.monotonic() - began
        rises = {"rank 0": own.rise(), "rank 1": its.rise()}
        sizes = sizes_of(trainer)
        trainer.close()
    return {"seconds": seconds, "rise": rises, **sizes}


def started(path: Path, options: dict[str, Any]) -> TorchTrainer:
    """Rank 0 of both."""
    trainer = TorchTrainer()
    trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, options=options))
    return trainer


def sizes_of(trainer: TorchTrainer) -> dict[str, int]:
    """Bytes of the model in fp32, and of a layer."""
    sizes = {name: 4 * array.numel() for name, array in trainer.gather_weights()}
    return {
        "bytes": sum(sizes.values()),
        "layer": sum(size for name, size in sizes.items() if ".layers.0." in name),
    }


def _print(found: dict[str, Any]) -> None:
    whole, layer, reading = found["bytes"], found["layer"], found["reading"]
    allowed = whole // _RANKS + layer
    rows = [
        Row("reading: rise / (its half + a layer)", reading / allowed, "<= 1", reading <= allowed),
        Row("    / the model", reading / whole),
        Row("all of it, seconds", found["seconds"]),
    ]
    for rank, rise in found["rise"].items():
        rows.append(Row(f"    rise on {rank}, less its half / a layer", (rise - whole // _RANKS) / layer))
        rows.append(Row(f"    rise on {rank} / the model", rise / whole))
    print_table(f"start of {whole / 2**20:.0f} MiB in {_RANKS} processes", rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    run(quick=parser.parse_args().quick)
