"""What it costs a torch trainer of two processes to start: the memory of either, and time.

Each process makes the model without its weights, divides it, and reads its own rows of each parameter. Then both try,
in a pass over a few tokens, whether the model can be packed, for which layers are gathered as in every pass. On a CPU
all of it is the host's memory: it is to rise by the process' half of the weights and what a pass gathers at once, a
layer and the output of its gathering. A model that is loaded whole before it is divided takes all of its bytes.

Peaks are the kernel's (`VmHWM`), which Linux alone has, over what both processes take after another model of theirs.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import tempfile
import time
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Row, print_table, write_record
from benchmarks.mesh_gather import Peak, other_rank
from pipelinerl.models.tiny_decoder import DebugSize, random_decoder
from pipelinerl.system.ports import free_ports
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.types import Device, TrainerSpec

_RANKS: Final = 2
_MESH: Final = {"dp_shard": _RANKS}


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    options = {"mesh": _MESH, "distributed": {"coordinator": coordinator}}
    with tempfile.TemporaryDirectory() as folder, other_rank(coordinator) as other:
        small, large = Path(folder) / "small", Path(folder) / "large"
        random_decoder(DebugSize.MB_3, seed=0).save_pretrained(small)
        random_decoder(DebugSize.MB_24 if quick else DebugSize.MB_310, seed=0).save_pretrained(large)
        started(small, options).close()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        own, its = Peak("self"), Peak(other)
        began = time.monotonic()
        trainer = started(large, options)
        seconds = time.monotonic() - began
        rises = {"rank 0": own.rise(), "rank 1": its.rise()}
        found = {"quick": quick, "seconds": seconds, "rise": rises, **sizes_of(trainer)}
        trainer.close()
    _print(found)
    write_record("mesh_start", found)
    return found


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
    whole, layer = found["bytes"], found["layer"]
    allowed = whole / _RANKS + 2 * layer
    print_table(
        f"start of {whole / 2**20:.0f} MiB in {_RANKS} processes",
        [Row("seconds", found["seconds"])]
        + [
            row
            for rank, rise in found["rise"].items()
            for row in (
                Row(f"rise on {rank} / (its half + 2 layers)", rise / allowed, "<= 1", rise <= allowed),
                Row(f"    / the model [{rise / 2**20:.0f} MiB]", rise / whole),
            )
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    run(quick=parser.parse_args().quick)
