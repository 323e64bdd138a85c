"""What it costs to gather the weights of a torch trainer of two processes: time, and memory on either of them.

    gather    `gather_weights` to its end, each parameter dropped when the next is asked for, as a publisher does
    memcpy    as many bytes, which lie as far apart as weights do, copied into one parameter's memory, on this process
    wire      the bytes of the other process, half of all, through a TCP connection of this machine, as gloo has them;
              those of a rank on this host do not go that way (`pipelinerl/trainers/ranks/shared_block.py`)

Gathering is to take no longer than twice memcpy and wire together; to raise memory by at most one layer on rank 0, and
by at most one parameter on the other. Peaks are the kernel's (`VmHWM`, begun anew by `clear_refs`), which Linux alone
has; the allocators give back what they have free before, since they would take it for the gathering unseen.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, final

import numpy as np

from benchmarks.measure import Row, bootstrap_median, paired, print_table, seconds_of, write_record
from pipelinerl.models.tiny_decoder import DebugSize, random_decoder
from pipelinerl.system.ports import free_ports
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.host_weights import bytes_of
from trainer_contract.types import Device, TrainerSpec

_RANKS: Final = 2
_MESH: Final = {"dp_shard": _RANKS}
_PIECE: Final = 2**20
#: What a rank allocates from this size on, in bytes, it gives back when it drops it.
GIVEN_BACK: Final = 2**17


@contextmanager
def other_rank(coordinator: str, environment: Mapping[str, str] = MappingProxyType({})) -> Iterator[int]:
    """Rank 1 of two, as a user starts it; its process id."""
    told = ["--set", f"trainer.options.mesh.dp_shard={_RANKS}"]
    told += ["--set", f"trainer.options.distributed.coordinator={json.dumps(coordinator)}"]
    argv = [sys.executable, "-m", "pipelinerl.cli", "trainer-rank", "--rank", "1", *told]
    rank = subprocess.Popen(argv, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": str(GIVEN_BACK), **environment})
    try:
        yield rank.pid
    finally:
        rank.kill()
        rank.wait()


def wired(size: int) -> None:
    """Send so many bytes through a connection of this machine, from a thread that holds no lock while it sends."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    sent, received = memoryview(bytearray(_PIECE)), bytearray(_PIECE)

    def send() -> None:
        for start in range(0, size, _PIECE):
            sender.sendall(sent[: min(_PIECE, size - start)])

    thread = threading.Thread(target=send)
    with sender, receiver:
        thread.start()
        left = size
        while left:
            left -= receiver.recv_into(received)
        thread.join()


@final
class Peak:
    """By how much a process' memory has been above what it was when this was made, in bytes."""

    def __init__(self, pid: int | str) -> None:
        self._folder = Path("/proc") / str(pid)
        (self._folder / "clear_refs").write_text("5")
        self._before = self._kib("VmRSS")

    def rise(self) -> int:
        """Bytes."""
        return 1024 * (self._kib("VmHWM") - self._before)

    def _kib(self, name: str) -> int:
        lines = (self._folder / "status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1])


def run(quick: bool = False) -> dict[str, Any]:
    """Measure, print, record."""
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    with tempfile.TemporaryDirectory() as folder, other_rank(coordinator) as other:
        path = Path(folder) / "model"
        random_decoder(DebugSize.MB_24 if quick else DebugSize.MB_310, seed=0).save_pretrained(path)
        trainer = TorchTrainer()
        options = {"mesh": _MESH, "distributed": {"coordinator": coordinator}}
        trainer.init_worker(TrainerSpec(model_path=path, device=Device.CPU, options=options))
        found = measured(trainer, other, rounds=3 if quick else 9)
        trainer.close()
    write_record("mesh_gather", {"quick": quick, **found})
    return found


def measured(trainer: TorchTrainer, other: int, *, rounds: int) -> dict[str, Any]:
    """Figures of this trainer, whose rank 1 is the process `other`."""
    sizes = {name: bytes_of(array).nbytes for name, array in trainer.gather_weights()}
    whole, largest = sum(sizes.values()), max(sizes.values())
    layer = sum(size for name, size in sizes.items() if ".layers.0." in name)
    sources, target = {name: np.ones(size, np.uint8) for name, size in sizes.items()}, np.ones(largest, np.uint8)

    def gather() -> None:
        for _ in trainer.gather_weights():
            pass

    def copy() -> None:
        for source in sources.values():
            np.copyto(target[: len(source)], source)

    arms = {
        "gather": seconds_of(gather),
        "memcpy": seconds_of(copy),
        "wire": seconds_of(lambda: wired(whole * (_RANKS - 1) // _RANKS)),
    }
    timings = paired(arms, rounds=rounds)
    ctypes.CDLL(None).malloc_trim(0)
    own, its = Peak("self"), Peak(other)
    for _, array in trainer.gather_weights():
        bytes_of(array).max()  # memory that is shared counts where it was read
    rises = {"rank 0": own.rise(), "rank 1": its.rise()}
    rounds_of = {name: np.array(values) for name, values in timings.samples.items()}
    ratio = bootstrap_median((rounds_of["gather"] / (2 * rounds_of["memcpy"] + rounds_of["wire"])).tolist())
    print_table(
        f"gather of {whole / 2**20:.0f} MiB from {_RANKS} processes",
        [
            Row("gather, ms", 1e3 * timings.median("gather")),
            Row("gather / (2 x memcpy + wire)", ratio, "<= 1", ratio.median <= 1),
            Row("rise on rank 0 / a layer", rises["rank 0"] / layer, "<= 1", rises["rank 0"] <= layer),
            Row("rise on rank 1 / a parameter", rises["rank 1"] / largest, "<= 1", rises["rank 1"] <= largest),
        ],
    )
    return {
        "bytes": whole,
        "layer": layer,
        "largest": largest,
        "rise": rises,
        "ratio": ratio.as_dict(),
        **timings.as_dict(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model, fewer rounds")
    run(quick=parser.parse_args().quick)
