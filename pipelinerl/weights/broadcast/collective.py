"""`Collective`: one process group between a trainer (rank 0) and its engines, made directly from a store.

Promises: it never touches torch's default group, so it lives beside whatever the trainer or the engine uses; each
membership has its own prefix in the store, so that a new one is independent of what became of the old; nothing waits
without a deadline; sockets are bound to one chosen address. Torch is imported here, so import this where it is needed.

Gloo cannot interrupt a receive that waits: it ends when the bytes come, when the sender leaves before it has begun to
send (`close` on the other side, or its death, seen within milliseconds), or at its deadline. In the middle of a tensor
the receiver may miss that the sender has gone; so tensors are small and deadlines short.

Large groups connect where bytes go, and nowhere else (`Connections.TREE`): a broadcast is a tree, in which 64 engines
and a trainer have 64 connections and not the 2,080 of every pair. A broadcast of one byte makes them, by which the
ranks meet: a rank that does not come is missed there, and one that leaves is heard of by those who wait for it.
"""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any, Final, final

import torch
import torch.distributed

from inference_contract.weights import Backend, Connections
from pipelinerl.errors import AddressError, DeadlineError, UpdateError
from pipelinerl.system.addresses import address_towards, without_name_servers
from pipelinerl.system.ports import family_of

#: A wait at the store cannot be interrupted, and torch prints two warnings for each that ends in vain. The store is
#: polled instead, at intervals of this share of the time waited so far, within these bounds.
_POLL_SHARE: Final = 0.05
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.01

#: Torch's stubs leave out most of what is made in C++.
dist: Any = torch.distributed


@final
class Rendezvous:
    """The store at which a membership meets, listening on `host` alone (a bare TCPStore listens everywhere)."""

    def __init__(self, host: str, port: int = 0) -> None:
        """Listen on (`host`, `port`); port 0 takes a free one.

        Raises:
            AddressError: the address cannot be bound.
        """
        listener = socket.socket(family_of(host), socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise AddressError(f"the weight rendezvous cannot listen on {host}:{port}: {error.strerror}") from error
        listener.listen(128)
        self.host = host
        self.port: int = listener.getsockname()[1]
        with without_name_servers(host):
            self._store: Any = dist.TCPStore(
                host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    def close(self) -> None:
        """Stop listening; groups that have formed live on."""
        self._store = None


@final
class Collective:
    """A formed process group. Used by one thread at a time; `close` may come from another."""

    def __init__(self, group: Any, store: Any, *, backend: Backend, name: str) -> None:
        self._group = group
        self._store = store
        self._backend = backend
        self._name = name

    @staticmethod
    def join(
        *,
        host: str,
        port: int,
        group: str,
        generation: int,
        rank: int,
        world_size: int,
        backend: Backend = Backend.GLOO,
        connections: Connections | None = None,
        timeout_s: float,
    ) -> Collective:
        """Meet the other ranks at the store on (`host`, `port`); blocks until all have come.

        Raises:
            DeadlineError: the store or a rank did not come within `timeout_s`.
            UpdateError: a rank broke off, or the backend is not available here.
        """
        name = f"group {group!r} generation {generation}"
        patience, deadline = timedelta(seconds=timeout_s), time.monotonic() + timeout_s
        try:
            with without_name_servers(host):
                store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
            membership = dist.PrefixStore(f"{group}/{generation}", store)
            address, lazy = address_towards(host, port), connections is Connections.TREE
            made = _process_group(backend, membership, rank, world_size, address, patience, lazy=lazy)
            if lazy:
                _meet(made, deadline)
        except (RuntimeError, OSError) as error:
            raise _translated(error, f"joining {name} at {host}:{port} as rank {rank} of {world_size}") from error
        return Collective(made, membership, backend=backend, name=name)

    @property
    def device(self) -> torch.device:
        """The device that tensors to broadcast must be on."""
        return torch.device("cpu" if self._backend is Backend.GLOO else "cuda")

    def announce(self, key: str, text: str) -> None:
        """Write `text` into the store at which this membership met, for ranks that `expect` it.

        Raises:
            UpdateError: the store has gone.
        """
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise _translated(error, f"announcing {key} in {self._name}") from error

    def expect(self, key: str, *, deadline: float) -> str:
        """What rank 0 announces as `key`; returns as soon as it is there.

        Raises:
            DeadlineError: nothing was announced until `deadline` (monotonic seconds).
            UpdateError: rank 0 has gone, or this rank has left the group meanwhile.
        """
        began = time.monotonic()
        while self._group is not None:
            try:
                if self._store.check([key]):
                    return str(self._store.get(key).decode(errors="replace"))
            except RuntimeError as error:
                raise _translated(error, f"waiting for {key} in {self._name}") from error
            now = time.monotonic()
            if now > deadline:
                raise DeadlineError(
                    f"waiting for {key} in {self._name}: rank 0 announced nothing in {now - began:.1f} s"
                )
            time.sleep(min(max((now - began) * _POLL_SHARE, _SHORTEST_POLL_S), _LONGEST_POLL_S))
        raise UpdateError(f"{self._name} was left")

    def broadcast(self, tensor: torch.Tensor, *, deadline: float, root: int = 0) -> None:
        """Send `tensor` from `root`, or receive into it; returns when the memory may be used again.

        Args:
            tensor: flat and contiguous; a host tensor for gloo, a device tensor for NCCL.
            deadline: on the monotonic clock, in seconds.

        Raises:
            DeadlineError: a rank was silent until the deadline.
            UpdateError: a rank left or died. After either error this rank has left the group: those that wait for it,
                and have not had part of the tensor, need not wait for their deadlines.
        """
        group, work = self._group, None
        if group is None:
            raise UpdateError(f"{self._name} was left")
        options = _options(root, deadline)
        try:
            work = group.broadcast([tensor], options)
            if self._backend is Backend.GLOO:
                work.wait(options.timeout)
            else:
                self._wait_on_device(work, deadline)
        except RuntimeError as error:
            group = work = None  # they hold the connections, and the error's traceback holds this frame
            self.close()
            raise _translated(error, f"a broadcast in {self._name}") from error

    def close(self) -> None:
        """Leave the group. Peers that wait in a collective with this rank fail at once. May be called twice."""
        group, self._group = self._group, None
        if group is not None and self._backend is Backend.NCCL:
            group.abort()

    @staticmethod
    def _wait_on_device(work: Any, deadline: float) -> None:
        # NCCL's own wait only orders streams; the host must know that the bytes are there.
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise RuntimeError("timed out")
            time.sleep(2e-4)
        work.wait()


def offers(backend: Backend) -> bool:
    """Returns whether this process can join a group of that backend."""
    return backend is Backend.GLOO or (torch.cuda.is_available() and hasattr(dist, "ProcessGroupNCCL"))


def shared_tensor(memory: Any) -> torch.Tensor:
    """Flat uint8 numpy memory as a tensor on the same bytes; a tensor is itself."""
    return memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)


def _process_group(
    backend: Backend, store: Any, rank: int, size: int, address: str, patience: timedelta, *, lazy: bool
) -> Any:
    if backend is Backend.GLOO:
        options = dist.ProcessGroupGloo._Options()
        # An address, not a name: gloo would look the machine's name up, which fails where there is no network.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)]
        options._timeout = patience
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, size, options)
    if not offers(backend):
        raise UpdateError("backend nccl needs CUDA, which torch does not find here; use gloo")
    nccl = dist.ProcessGroupNCCL.Options()
    nccl._timeout = patience
    made = dist.ProcessGroupNCCL(store, rank, size, nccl)
    # NCCL connects at the first collective unless told to: a missing rank must be found now.
    made.eager_connect_single_device(torch.device("cuda", torch.cuda.current_device()))
    return made


def _meet(group: Any, deadline: float) -> None:
    """Connect to those from whom this rank gets its bytes, and to whom it passes them on."""
    options = _options(0, deadline)
    group.broadcast([torch.zeros(1, dtype=torch.uint8)], options).wait(options.timeout)


def _options(root: int, deadline: float) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
    return options


def _translated(error: RuntimeError | OSError, doing: str) -> DeadlineError | UpdateError:
    """Torch's error as one of ours, shortened to its first sentence."""
    text = str(error).split(". This is")[0].rsplit("] ", 1)[-1] if "pair.cc" in str(error) else str(error)
    reason = text.splitlines()[0][:200]
    if "time" in reason.lower() and "out" in reason.lower():
        return DeadlineError(f"{doing} ended without every rank in time: {reason}")
    return UpdateError(f"{doing} broke: {reason}")
