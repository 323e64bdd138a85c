"""The checks of `gpu_check` that need two processes: ranks of one trainer, or a trainer that broadcasts to a receiver.

mesh      losses of three steps with the model sharded (`dp_shard`) and with tokens divided (`cp`), against those of one
          process, in fp32 and bf16; weights gathered during a backward pass must equal weights gathered when idle
group     bytes broadcast to another process: whether they arrive unchanged, and their rate
killed    the receiver is killed in the middle of a broadcast: the sender must raise an error before its deadline, and
          a new group must work immediately afterwards

NCCL connects the processes if there are two GPUs; otherwise gloo does, and `mesh` is not checked.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks.gpu_device import Scale, backend_of, wait
from benchmarks.gpu_trainer import random_batch
from benchmarks.measure import Row
from benchmarks.processes import Child, spawned
from benchmarks.torch_step import OBJECTIVE, losses, trainer_of
from inference_contract.weights import Backend
from pipelinerl.errors import DeadlineError, UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.system.machine import free_ports
from pipelinerl.weights.broadcast.collective import Collective, Rendezvous
from trainer_contract.host_weights import copied
from trainer_contract.trainer import Trainer
from trainer_contract.types import MicroBatch, Precision

#: Largest allowed difference of a loss from the loss of a single process, by precision.
_ALLOWED: Final = {Precision.FP32: 1e-4, Precision.BF16: 2e-2}
_MESHES: Final = ({"dp_shard": 2}, {"cp": 2})
_RATE: Final = 1e-5
#: In seconds: time limit for a group to form, delay before a member is killed, and time limit of a broadcast.
_JOIN_S: Final = 60.0
_KILL_S: Final = 0.2
_SILENCE_S: Final = 10.0


@contextmanager
def other_rank(coordinator: str) -> Iterator[None]:
    """Run rank 1 of a two-process trainer on the second GPU, as a process of the command `trainer-rank`."""
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
    """Compare a trainer of two processes (rank 0 is this one) with a single-process trainer; skip without two GPUs."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return [Row("trainer of two processes", "not checked: it needs two GPUs")], {"checked": False}
    batch = random_batch(scale)
    alone = {
        precision: losses(trainer_of(folder, device, precision), batch, learning_rate=_RATE) for precision in _ALLOWED
    }
    coordinator = f"127.0.0.1:{free_ports(1)[0]}"
    distributed = {"distributed": {"coordinator": coordinator}}
    rows, results = [], {}
    with other_rank(coordinator):
        for mesh in _MESHES:
            for precision, allowed in _ALLOWED.items():
                trainer = trainer_of(folder, device, precision, options={"mesh": mesh, **distributed})
                apart = float(np.abs(losses(trainer, batch, learning_rate=_RATE) - alone[precision]).max())
                name = f"{precision}, {'='.join(map(str, *mesh.items()))}: largest |Δ loss| from one process"
                rows.append(Row(name, apart, f"<= {allowed:g}", apart <= allowed))
                results[name] = apart
        trainer = trainer_of(folder, device, Precision.BF16, options={"mesh": _MESHES[0], **distributed})
        differ = _gathered_during_passes(trainer, batch)
        trainer.close()
    rows.append(Row("parameters that differ when gathered during a pass", differ, "0", differ == 0))
    return rows, {"checked": True, **results, "gathered_differ": differ}


def _gathered_during_passes(trainer: Trainer, batch: MicroBatch) -> int:
    """Return how many parameters differ between weights gathered during backward passes and weights gathered idle."""
    idle = copied(trainer.gather_weights())
    gathering = in_background("gather", lambda: copied(trainer.gather_weights()))
    while not gathering.done():
        trainer.backward([batch], OBJECTIVE)
        trainer.discard_gradient()
    results = gathering.result()
    return sum(not np.array_equal(array, results[name]) for name, array in idle.items())


def check_group(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Broadcast weights to another process, and compare the sums of the bytes sent and received."""
    del folder
    size, backend = min(scale.copy_bytes, 2**28), backend_of(device)
    with _member(backend) as meet:
        group, other = meet()
        sent = torch.arange(size, device=group.device, dtype=torch.int64).to(torch.uint8)
        began, rounds, arrived = 0.0, 4, 0
        for number in range(rounds + 1):  # the first round also connects the ranks, so its time is discarded
            if number == 1:
                wait(device)
                began = time.perf_counter()
            arrived = _sum_received(group, other, sent)
        rate = rounds * size / (time.perf_counter() - began)
        group.close()
    same = arrived == int(sent.long().sum())
    rows = [
        Row(f"{backend}: bytes that arrived have the sum of those sent", str(same), "True", same),
        Row("    broadcast to one process [GB/s]", rate / 1e9),
    ]
    return rows, {"backend": backend.value, "bytes_per_s": rate, "arrived": same}


def check_killed(folder: Path, scale: Scale, device: torch.device) -> tuple[list[Row], dict[str, Any]]:
    """Kill the receiving process during a broadcast; then form a group with a new process."""
    del folder
    size, backend = min(scale.copy_bytes, 2**26), backend_of(device)
    with _member(backend) as meet:
        group, other = meet()
        sent = torch.ones(size, device=group.device, dtype=torch.uint8)
        killed_at, error = time.monotonic() + _KILL_S, "none"
        killer = threading.Timer(_KILL_S, os.kill, (other.pid, signal.SIGKILL))
        killer.start()
        try:
            while time.monotonic() < killed_at + _SILENCE_S:
                with suppress(OSError):  # the receiver may be dead already
                    other.pipe.send(size)
                group.broadcast(sent, deadline=time.monotonic() + _SILENCE_S)
        except (UpdateError, DeadlineError) as failure:
            error = f"{type(failure).__name__}: {failure}"
        killer.join()
        detected_s = time.monotonic() - killed_at
    with _member(backend) as meet:
        group, other = meet()
        works = _sum_received(group, other, sent) == size
        group.close()
    noticed = error != "none" and detected_s <= _SILENCE_S + 5.0
    rows = [
        Row(f"{backend}, member killed: seconds until the error", detected_s, f"<= {_SILENCE_S + 5:g}", noticed),
        Row("a new group works afterwards", str(works), "True", works),
        Row("    the error", error[:60]),
    ]
    return rows, {"backend": backend.value, "error": error, "detected_s": detected_s, "works_again": works}


def _sum_received(group: Collective, other: Child, sent: torch.Tensor) -> int:
    other.pipe.send(len(sent))
    group.broadcast(sent, deadline=time.monotonic() + _SILENCE_S)
    return int(other.pipe.recv())


@contextmanager
def _member(backend: Backend) -> Iterator[Callable[[], tuple[Collective, Child]]]:
    """Start a process that joins a group as rank 1; yield a function that joins as rank 0 (returns group, process)."""
    rendezvous = Rendezvous("127.0.0.1")
    join = partial(
        Collective.join,
        host=rendezvous.host,
        port=rendezvous.port,
        group="gpu_check",
        generation=1,
        world_size=2,
        backend=backend,
        timeout_s=_JOIN_S,
    )
    with spawned(_receive, partial(join, rank=1), backend) as other:
        yield lambda: (join(rank=0), other)


def _receive(join: Callable[[], Collective], backend: Backend, pipe: Connection) -> None:
    """Join the group; for each message, receive that number of bytes and answer with their sum."""
    if backend is Backend.NCCL:
        torch.cuda.set_device(1)
    pipe.send("started")
    group = join()
    while True:
        received = torch.zeros(pipe.recv(), dtype=torch.uint8, device=group.device)
        group.broadcast(received, deadline=time.monotonic() + _SILENCE_S)
        pipe.send(int(received.long().sum()))
