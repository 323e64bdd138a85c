"""`Collective`: a process group of a trainer (rank 0) and its engines, built directly on a torch store.

The group never touches torch's default group, so it coexists with any other group of the trainer or engine. If engines
join or leave, a group of the next generation is formed. Each generation has its own prefix in the store, so leftovers
of older ones do no harm. Every wait has a deadline, and sockets are bound to one chosen address. This module imports
torch, so import it only where torch is needed.

A blocked receive of gloo cannot be interrupted. It ends when the bytes arrive, at its deadline, or when the sender
leaves or dies before it starts to send. If the sender dies in the middle of a tensor, the receiver may not notice, so
tensors are small and deadlines short. Large groups connect only along the edges of a broadcast tree
(`Connections.TREE`): 64 engines need 64 connections instead of the 2,080 of a full mesh. While the group forms, a
broadcast of one byte opens these connections, so that a missing rank is detected.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import wait
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed

from inference_contract.weights import Backend, Connections
from pipelinerl.errors import AddressError, DeadlineError, UpdateError
from pipelinerl.system.background import in_background
from pipelinerl.system.machine import address_towards, family_of, without_name_servers

#: Interval between polls of the store: this share of the time waited so far, within these bounds (seconds). The store
#: is polled because a blocking wait cannot be interrupted, and torch prints two warnings whenever one times out.
_POLL_SHARE: Final = 0.05
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.001, 0.01

#: Untyped, because torch's type stubs omit most of what is implemented in C++.
dist: Any = torch.distributed


class Rendezvous:
    """The store through which members of a group connect. Unlike a plain TCPStore, it listens only on `host`."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of `host`. Raises AddressError if the address cannot be bound."""
        listener = socket.socket(family_of(host), socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, 0))
        except OSError as error:
            listener.close()
            raise AddressError(f"the weight rendezvous cannot listen on {host}: {error.strerror}") from error
        listener.listen(128)
        self.host = host
        self.port: int = listener.getsockname()[1]
        with without_name_servers(host):
            self._store: Any = dist.TCPStore(
                host, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )

    def close(self) -> None:
        """Stop listening; groups that have already formed keep working."""
        self._store = None


class Collective:
    """A formed process group. One thread uses it at a time; `close` may be called from another thread."""

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
        """Join the group through the store; block until all ranks have joined. Raises DeadlineError after `timeout_s`,
        UpdateError if the store is closed, a rank has left, or this process lacks the backend.
        """
        name = f"group {group!r} generation {generation}"
        patience, deadline = timedelta(seconds=timeout_s), time.monotonic() + timeout_s
        try:
            # Connect once before torch does, which would retry until the deadline. The store is up before any engine is
            # asked to join, so a refused connection means that the trainer has given up on this group.
            socket.create_connection((host, port), timeout=timeout_s).close()
            with without_name_servers(host):
                store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=patience)
            membership = dist.PrefixStore(f"{group}/{generation}", store)
            address, lazy = address_towards(host, port), connections is Connections.TREE
            made = _process_group(backend, membership, rank, world_size, address, deadline, lazy=lazy)
            if lazy:  # connect to the ranks with which this rank exchanges bytes in a broadcast
                options = _options(deadline)
                made.broadcast([torch.zeros(1, dtype=torch.uint8)], options).wait(options.timeout)
        except (RuntimeError, OSError) as error:
            raise _translated(error, f"joining {name} at {host}:{port} as rank {rank} of {world_size}") from error
        return Collective(made, membership, backend=backend, name=name)

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self._backend is Backend.GLOO else "cuda")

    def announce(self, key: str, text: str) -> None:
        """Write `text` under `key` to the store, for `expect`. Raises UpdateError if the store is gone."""
        try:
            self._store.set(key, text)
        except RuntimeError as error:
            raise _translated(error, f"announcing {key} in {self._name}") from error

    def expect(self, key: str, *, deadline: float) -> str:
        """Return rank 0's text under `key`. Raises DeadlineError at `deadline`, UpdateError if left or gone."""
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
        raise UpdateError(f"this process has left {self._name}")

    def broadcast(self, tensor: torch.Tensor, *, deadline: float) -> None:
        """Send `tensor` from rank 0, or receive into it; return when the memory may be reused.

        Args:
            tensor: flat and contiguous; a host tensor for gloo, a device tensor for NCCL.
            deadline: on the monotonic clock, in seconds.

        Raises:
            DeadlineError: a rank was silent until the deadline.
            UpdateError: a rank left or died. After either error this rank has left the group. Other ranks that wait for
                this rank, and have received no part of the tensor yet, then fail without waiting for their deadlines.
        """
        group, work = self._group, None
        if group is None:
            raise UpdateError(f"this process has left {self._name}")
        options = _options(deadline)
        try:
            work = group.broadcast([tensor], options)
            if self._backend is Backend.GLOO:
                work.wait(options.timeout)  # `wait` raises the error with which the broadcast failed
            else:
                wait_for_nccl(work, deadline=deadline)
        except RuntimeError as error:
            group = work = None  # drop references, which would keep connections open while a traceback holds this frame
            self.close()
            raise _translated(error, f"a broadcast in {self._name}") from error
        if self._group is not group:  # another thread's `close` aborts the work, which may then look complete
            raise UpdateError(f"this process left {self._name} during a broadcast")

    def close(self) -> None:
        """Leave the group; ranks that wait for this rank in a broadcast fail immediately. Idempotent."""
        group, self._group = self._group, None
        if group is not None and self._backend is Backend.NCCL:
            abort_nccl(group)


def offers(backend: Backend) -> bool:
    """Return whether this process can join a group of that backend."""
    return backend is Backend.GLOO or (torch.cuda.is_available() and hasattr(dist, "ProcessGroupNCCL"))


def shared_tensor(memory: Any) -> torch.Tensor:
    """View flat uint8 numpy memory as a tensor on the same bytes; return a tensor unchanged."""
    return memory if isinstance(memory, torch.Tensor) else torch.from_numpy(memory)


def _process_group(
    backend: Backend, store: Any, rank: int, size: int, address: str, deadline: float, *, lazy: bool
) -> Any:
    remaining_s = max(deadline - time.monotonic(), 1e-3)
    if backend is Backend.GLOO:
        options = dist.ProcessGroupGloo._Options()
        # Pass an address; by default gloo would resolve the host name, which fails without a network.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=lazy)]
        options._timeout = timedelta(seconds=remaining_s)
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, size, options)
    if not offers(backend):
        raise UpdateError("backend nccl needs CUDA, which torch does not find here; use gloo")
    device = torch.device("cuda", torch.cuda.current_device())
    return connect_nccl(dist, store, rank=rank, size=size, device=device, timeout_s=remaining_s)


def _options(deadline: float) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.timeout = timedelta(seconds=max(deadline - time.monotonic(), 1e-3))
    return options


def _translated(error: RuntimeError | OSError, doing: str) -> DeadlineError | UpdateError:
    text = str(error).split(". This is")[0].rsplit("] ", 1)[-1] if "pair.cc" in str(error) else str(error)
    reason = (text.splitlines() or [type(error).__name__])[0][:200]
    if "time" in reason.lower() and "out" in reason.lower():
        return DeadlineError(f"{doing} timed out, not every rank took part: {reason}")
    return UpdateError(f"{doing} failed: {reason}")


# --- NCCL -------------------------------------------------------------------------------------------------------------
#
# By default, torch's watchdog ends the whole process when a rank of an NCCL group dies. `connect_nccl` turns the
# watchdog off for its own group only, so that a failure is an error in the calling thread, within a deadline; other
# groups of the process, such as a trainer's, keep torch's behaviour. A torch work object also counts as complete when
# it has failed; its `wait` then raises, and the owner of the failed group aborts the group with `abort_nccl`.
#
# Communicators are non-blocking: a thread connects, and the caller waits for this thread until the deadline. Waits of
# torch within the thread end after `TORCH_NCCL_NONBLOCKING_TIMEOUT` seconds.
#
# This NCCL code has not been run on GPUs. Its tests use work objects of gloo, and a fake with torch's signatures.

#: Environment variables that are set while torch builds an NCCL group. They keep torch's watchdog thread from ending
#: the process or writing traces when a rank fails.
_WITHOUT_WATCHDOG: Final = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_environment = threading.Lock()

#: Longest time in seconds to connect. With torch's default, the thread of an abandoned connection lives for 30 minutes.
_LONGEST_CONNECT_S: Final = 120
_ABORT_S: Final = 5.0
_POLL_S: Final = 2e-4


def connect_nccl(library: Any, store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> Any:
    """Connect all ranks within `timeout_s`, by `torch.distributed` or a fake. Raises RuntimeError, and aborts."""
    deadline = time.monotonic() + timeout_s
    options = library.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.config.blocking = 0
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(_LONGEST_CONNECT_S))
    with _environment:
        before = {name: os.environ.pop(name, None) for name in _WITHOUT_WATCHDOG}
        os.environ.update(_WITHOUT_WATCHDOG)
        try:
            group = library.ProcessGroupNCCL(store, rank, size, options)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value

    def connect() -> None:
        # By default NCCL connects at the first collective. Connect now, so that a missing rank is detected here.
        group.eager_connect_single_device(device)
        options = library.BroadcastOptions()
        options.rootRank = 0
        wait_for_nccl(group.broadcast([torch.zeros(1, dtype=torch.uint8, device=device)], options), deadline=deadline)

    connecting = in_background(f"connect-{rank}", connect)
    try:
        connecting.result(max(deadline - time.monotonic(), 0.0))
    except TimeoutError:
        abort_nccl(group)
        raise RuntimeError(f"NCCL timed out: not every rank connected within {timeout_s:g} s") from None
    except BaseException:
        abort_nccl(group)
        raise
    return group


def wait_for_nccl(work: Any, *, deadline: float) -> None:
    """Wait until the bytes of `work` have arrived; torch's own `wait` only orders CUDA streams. Raises RuntimeError."""
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise RuntimeError("timed out")
        time.sleep(_POLL_S)
    work.wait()  # raises the error of a failed work, which `exception` of torch 2.11 cannot return


def abort_nccl(group: Any) -> None:
    """End all work of the group and free its communicator, ignoring errors, within `_ABORT_S`."""
    # NCCL's abort may block while another thread is still connecting, so wait only for a limited time.
    wait([in_background("abort", group.abort)], timeout=_ABORT_S)
