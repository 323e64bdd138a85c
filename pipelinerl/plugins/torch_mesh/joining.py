"""Initialisation of multi-process torch, once all processes have connected.

    default group   for the passes, with gloo on CPU tensors and NCCL on CUDA tensors
    reads           for sending weights to rank 0 during the passes, with gloo, point to point

The tensor's device selects the default group's backend, so tests with gloo run the same code as NCCL.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import msgspec
import numpy as np
import torch
import torch.distributed
from torch.distributed.fsdp import FSDPModule

from pipelinerl.system.machine import family_of
from pipelinerl.trainers.ranks.rendezvous import Distributed
from pipelinerl.trainers.ranks.shared_block import Place, is_here, shared_block
from trainer_contract.errors import SpecError, StateError

#: Torch's stubs omit most functions that are implemented in C++.
dist: Any = torch.distributed
#: Maximum length in bytes of an error message that a process sends to the others at startup, and the classes of errors
#: that it may send.
_SENTENCE_BYTES: Final = 1000
_KINDS: Final = (SpecError, StateError)
#: Format of a number that rank 0 writes into shared memory. Other ranks read it to verify that they opened rank 0's
#: memory.
_CONTENT: Final = struct.Struct("<q")


@dataclass(frozen=True, slots=True)
class TorchWorld:
    """A process's rank and facts about the others; `reads` is the group for sending weights to rank 0 during passes.

    Ranks in `on_same_host` can write into rank 0's memory. `views` has a number for each rank; ranks of one host that
    see the same GPUs have equal numbers.
    """

    rank: int
    reads: Any
    on_same_host: frozenset[int]
    views: tuple[int, ...]


_world: TorchWorld | None = None


def world() -> TorchWorld:
    """Return the `TorchWorld` of this process, which must have joined the others."""
    assert _world is not None, "the processes have not met yet"
    return _world


def join(distributed: Distributed, port: int) -> None:
    """Join the other processes by torch's rendezvous at `port` of the coordinator's host. Raises SpecError."""
    global _world
    if not hasattr(FSDPModule, "reset_iter_state"):
        raise SpecError(
            f"options.distributed: several processes need torch 2.13, not {torch.__version__}; install it, or "
            "train with one process"
        )
    if dist.is_initialized():
        raise SpecError("options.distributed: this process is one of several already; start another process")
    host, timeout = distributed.address[0], timedelta(seconds=distributed.timeout_s)
    if distributed.is_on_one_machine:
        # Make gloo listen on loopback; its default, the address of the host name, may be reachable from outside.
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
        if names:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=_store(host, port, distributed, timeout),
            rank=distributed.process,
            world_size=distributed.processes,
            timeout=timeout,
        )
        reads = dist.new_group(backend="gloo", timeout=timeout)
        rank = distributed.process
        facts = (socket.gethostname(), uuid.getnode(), os.environ.get("CUDA_VISIBLE_DEVICES"))
        own = torch.tensor(int.from_bytes(hashlib.sha256(repr(facts).encode()).digest()[:7]))
        # The time serves as a number that is unique to this call.
        now, offer = time.time_ns(), torch.zeros(5, dtype=torch.int64)
        with suppress(OSError):  # fails if shared memory is not supported; rank 0 then offers none
            if rank == 0:
                block, place = shared_block(_CONTENT.size)
                block[:] = np.frombuffer(_CONTENT.pack(now), np.uint8)
                offer = torch.tensor([*msgspec.structs.astuple(place), now])
        dist.broadcast(offer, 0)
        *place_of, content = offer.tolist()
        can = torch.tensor(is_here(Place(*place_of), _CONTENT.pack(content)), dtype=torch.int32)
        _world = TorchWorld(
            rank,
            reads,
            frozenset(number for number, each in enumerate(_gathered(can)) if number and each),
            tuple(int(each) for each in _gathered(own)),
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise SpecError(f"options.distributed: the other processes cannot be joined: {error}") from error


def _store(host: str, port: int, distributed: Distributed, timeout: timedelta) -> Any:
    if distributed.process:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
    # By default a TCPStore would listen on every address; give it a socket that listens only on this one.
    listener = socket.create_server((host, port), family=family_of(host))
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listener.detach()
    )


def _gathered(own: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors of all processes, by rank."""
    tensors = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(tensors, own)
    return tensors


@contextmanager
def in_agreement() -> Iterator[None]:
    """If the block raises SpecError or StateError on one process, raise it on all, since the others would hang."""
    own: SpecError | StateError | None = None
    try:
        yield
    except _KINDS as error:
        own = error
    message = torch.zeros(1 + _SENTENCE_BYTES, dtype=torch.uint8)
    if own is not None:
        sentence = str(own).encode()[:_SENTENCE_BYTES]
        message[0] = 1 + _KINDS.index(SpecError if isinstance(own, SpecError) else StateError)
        message[1 : 1 + len(sentence)] = torch.tensor(list(sentence), dtype=torch.uint8)
    messages = _gathered(message)
    if own is not None:
        raise own
    for rank, (kind, *text) in enumerate(each.tolist() for each in messages):
        if kind:
            raise _KINDS[kind - 1](f"rank {rank}: {bytes(text).rstrip(bytes(1)).decode(errors='replace')}")
