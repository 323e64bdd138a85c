"""How several processes become one torch world, once all of them are known to be there.

    default group   the passes: gloo on CPU tensors, NCCL on CUDA tensors
    reads           gloo, point to point, beside the passes

Which of the default group's backends runs is the tensor's to say, so the code that gloo tests is the code that NCCL
runs. Promise: the store at which they meet listens on the coordinator's host alone.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed

from pipelinerl.trainers.ranks.distributed import Distributed
from trainer_contract.errors import SpecError, StateError

#: Torch's stubs leave out most of what is made in C++.
dist: Any = torch.distributed
#: What a process tells the others of why it cannot start, and of which of these kinds it is.
_SENTENCE_BYTES: Final = 1000
_KINDS: Final = (SpecError, StateError)


@final
@dataclass(frozen=True, slots=True)
class TorchWorld:
    """This process among the others; `reads` is the group of what is read beside the passes."""

    rank: int
    reads: Any


_world: TorchWorld | None = None


def world() -> TorchWorld:
    """The world that this process has joined."""
    assert _world is not None, "the processes have not met yet"
    return _world


def join(distributed: Distributed, port: int) -> None:
    """Meet at this port of the coordinator's host. Raises SpecError."""
    global _world
    if dist.is_initialized():
        raise SpecError("options.distributed: this process is one of several already; start another process")
    host, patience = distributed.address[0], timedelta(seconds=distributed.timeout_s)
    if distributed.is_on_one_machine:
        _bind_gloo_to_loopback()
    try:
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            store=_store(host, port, distributed, patience),
            rank=distributed.process,
            world_size=distributed.processes,
            timeout=patience,
        )
        _world = TorchWorld(distributed.process, dist.new_group(backend="gloo", timeout=patience))
    except (RuntimeError, ValueError, OSError) as error:
        raise SpecError(f"options.distributed: the other processes cannot be joined: {error}") from error


def _store(host: str, port: int, distributed: Distributed, patience: timedelta) -> Any:
    if distributed.process:
        return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family)  # a bare TCPStore listens everywhere
    return dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, timeout=patience, master_listen_fd=listener.detach()
    )


def _bind_gloo_to_loopback() -> None:
    """Gloo listens at the address of the host's name otherwise, which others may reach."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if names:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", names[0])


@contextmanager
def in_agreement() -> Iterator[None]:
    """What one process finds here all of them raise, so that none waits for one that has given up.

    Raises:
        SpecError, StateError: this process' own, or else that of the first that has one.
    """
    own: SpecError | StateError | None = None
    try:
        yield
    except _KINDS as error:
        own = error
    said = torch.zeros(1 + _SENTENCE_BYTES, dtype=torch.uint8)
    if own is not None:
        sentence = str(own).encode()[:_SENTENCE_BYTES]
        said[0] = 1 + _KINDS.index(SpecError if isinstance(own, SpecError) else StateError)
        said[1 : 1 + len(sentence)] = torch.tensor(list(sentence), dtype=torch.uint8)
    heard = [torch.empty_like(said) for _ in range(dist.get_world_size())]
    dist.all_gather(heard, said)
    if own is not None:
        raise own
    for rank, (kind, *text) in enumerate(each.tolist() for each in heard):
        if kind:
            raise _KINDS[kind - 1](f"rank {rank}: {bytes(text).rstrip(bytes(1)).decode(errors='replace')}")
