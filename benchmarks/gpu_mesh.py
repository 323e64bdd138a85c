"""`gpu_check`'s part on a torch trainer of two processes, each on a GPU of its own, connected by NCCL.

shards, tokens    losses of three steps with the model divided (`dp_shard`) and with tokens shared (`cp`), against
                  one process, in fp32 and bf16
gather            weights gathered during a backward pass equal those gathered while nothing runs, to the bit
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu_device import Scale
from benchmarks.gpu_trainer import random_batch
from benchmarks.measure import Row
from pipelinerl.objective.presets import resolve
from pipelinerl.system.machine import free_ports
from pipelinerl.trainers.torch.trainer import TorchTrainer
from trainer_contract.host_weights import copied
from trainer_contract.types import Device, MicroBatch, Precision, TrainerSpec

#: Largest difference of a loss from one process, by precision.
_ALLOWED: Final = {Precision.FP32: 1e-4, Precision.BF16: 2e-2}
_MESHES: Final = ({"dp_shard": 2}, {"cp": 2})
_RATE: Final = 1e-5


@contextmanager
def other_rank(coordinator: str) -> Iterator[None]:
    """Start rank 1 of two as a user does, on the second GPU."""
    options = ["--set", "trainer.options.mesh.dp_shard=2"]
    options += ["--set", f"trainer.options.distributed.coordinator={json.dumps(coordinator)}"]
    argv = [sys.executable, "-m", "pipelinerl.cli", "trainer-rank", "--rank", "1", *options]
    rank = subprocess.Popen(argv, env=os.environ | {"CUDA_VISIBLE_DEVICES": "1"})
    try:
        yield
    finally:
        rank.kill()
        rank.wait()


def check_mesh(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare two processes with one; with fewer than two GPUs report that nothing was checked."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return [Row("trainer of two processes", "not checked: it needs two GPUs")], {"checked": False}
    return compared(folder, random_batch(scale), device)


def compared(folder: Path, batch: MicroBatch, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Compare two processes with this one, which becomes their rank 0."""
    alone = {precision: _losses(_started(folder, device, precision, {}), batch) for precision in _ALLOWED}
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    distributed = {"distributed": {"coordinator": coordinator}}
    rows, results = [], {}
    with other_rank(coordinator):
        for mesh in _MESHES:
            for precision, allowed in _ALLOWED.items():
                trainer = _started(folder, device, precision, {"mesh": mesh, **distributed})
                apart = float(np.abs(_losses(trainer, batch) - alone[precision]).max())
                name = f"{precision}, {'='.join(map(str, *mesh.items()))}: largest |Δ loss| from one process"
                rows.append(Row(name, apart, f"<= {allowed:g}", apart <= allowed))
                results[name] = apart
        trainer = _started(folder, device, Precision.BF16, {"mesh": _MESHES[0], **distributed})
        differ = _gathered_during_passes(trainer, batch)
        trainer.close()
    rows.append(Row("parameters that differ when gathered during a pass", differ, "0", differ == 0))
    return rows, {"checked": True, **results, "gathered_differ": differ}


def _started(folder: Path, device: torch.device, precision: Precision, options: dict[str, Any]) -> TorchTrainer:
    trainer = TorchTrainer()
    trainer.init_worker(
        TrainerSpec(model_path=folder, device=Device(device.type), precision=precision, options=options)
    )
    return trainer


def _losses(trainer: TorchTrainer, batch: MicroBatch) -> np.ndarray[Any, np.dtype[np.float64]]:
    results = []
    for _ in range(3):
        results.append(trainer.backward([batch], resolve("pipelinerl"))[0].loss)
        trainer.optimizer_step(learning_rate=_RATE)
    trainer.close()
    return np.array(results)


def _gathered_during_passes(trainer: TorchTrainer, batch: MicroBatch) -> int:
    """Return the number of parameters that differ when gathered during passes."""
    idle = copied(trainer.gather_weights())
    ended = threading.Event()

    def passes() -> None:
        while not ended.is_set():
            trainer.backward([batch], resolve("pipelinerl"))
            trainer.discard_gradient()

    thread = threading.Thread(target=passes)
    thread.start()
    try:
        results = copied(trainer.gather_weights())
    finally:
        ended.set()
        thread.join()
    return sum(not np.array_equal(array, results[name]) for name, array in idle.items())
