"""`GroupMember`: an engine's endpoint in the weight group, as a sequence of memberships ordered by generation.

At most one membership is usable. Joins run on threads, never on the event loop. A membership replaces the previous one
only when it has formed, so a failed join changes nothing. A generation that failed or was left is never used again,
because its key prefix in the rendezvous store is used up; the remedy is a higher generation.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from inference_contract.errors import (
    ContractError,
    DeadlineExceeded,
    InvalidRequest,
    NotPrepared,
    Overloaded,
    PeerLost,
    StaleGeneration,
)
from inference_contract.weights import MOST_GENERATION_STEP, Backend, InitProcessGroupRequest, ProcessGroupStatus
from pipelinerl.errors import DeadlineError, PipelineError
from pipelinerl.system.background import in_background_soon, settled, tell


class GroupEndpoint(Protocol):
    """A rank's endpoint in a formed group, such as `Collective`. One thread uses it; any thread may `close` it."""

    def expect(self, key: str, *, deadline: float) -> str:
        """Return the text that rank 0 announces under `key`; raise if none comes before `deadline` (monotonic s)."""
        ...

    def broadcast(self, tensor: Any, *, deadline: float) -> None:
        """Receive into a flat part of the staging buffer until `deadline` (monotonic s). Any error leaves the group."""
        ...

    def close(self) -> None:
        """Leave the group. Repeating is a no-op."""
        ...


class EndpointFactory(Protocol):
    """Factory of the endpoints with which an engine joins weight groups; they may run in another process."""

    def reaches(self, backend: Backend, staging: Any) -> bool:
        """Return True if groups of `backend` can deliver bytes into `staging`."""
        ...

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        """Return uint8 [num_bytes] like `staging` for weights of another dtype; `InvalidRequest` if memory is low."""
        ...

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        """Join a group; blocks until every rank has joined. Raises `DeadlineError` or `UpdateError`."""
        ...


class _InProcess:
    def reaches(self, backend: Backend, staging: Any) -> bool:
        """Return True if the backend can deliver into `staging`: NCCL delivers only from GPU to GPU."""
        return backend is not Backend.NCCL or str(getattr(staging, "device", "cpu")).startswith("cuda")

    def buffer(self, staging: Any, num_bytes: int) -> Any:
        if isinstance(staging, np.ndarray):
            return np.empty(num_bytes, np.uint8)
        return staging.new_empty(num_bytes)

    def join(self, request: InitProcessGroupRequest) -> GroupEndpoint:
        # Imported here, because an engine without torch can serve until its first update.
        from pipelinerl.weights.broadcast.collective import Collective

        return Collective.join(
            host=request.rendezvous_host,
            port=request.rendezvous_port,
            group=request.group,
            generation=request.generation,
            rank=request.rank,
            world_size=request.world_size,
            backend=request.backend,
            connections=request.connections,
            timeout_s=request.timeout_s,
        )


IN_PROCESS: Final[EndpointFactory] = _InProcess()


#: Maximum number of joins that may wait for their peers at the same time; each join has a thread.
_MOST_JOINING: Final = 16
#: Longest time in seconds to leave a group; the abort of an NCCL group ends within 5 s.
_LEAVES_S: Final = 10.0


@dataclass(slots=True)
class _Membership:
    request: InitProcessGroupRequest
    joining: Future[GroupEndpoint]
    usable: bool = True
    left: Future[None] | None = None

    @property
    def formed(self) -> bool:
        return self.joining.done() and self.joining.exception() is None

    def leave(self) -> None:
        """Leave on another thread: gloo takes 10 ms and NCCL up to 5 s, which would block the event loop.

        A join cannot be interrupted, so an unfinished one is left once the group forms.
        """
        self.usable = False
        if self.left is None:
            self.left = in_background_soon(f"leave-{self.request.generation}", self.close_if_left)

    def close_if_left(self) -> None:
        if not self.usable and self.formed:
            self.joining.result().close()


class GroupMember:
    """The engine's current membership, for one event loop. `on_replaced` is called before a membership is replaced."""

    def __init__(self, endpoints: EndpointFactory, *, on_replaced: Callable[[], None] = lambda: None) -> None:
        self._endpoints = endpoints
        self._on_replaced = on_replaced
        self._membership: _Membership | None = None
        self._joining: dict[int, _Membership] = {}
        self._spent: deque[int] = deque(maxlen=_MOST_JOINING)

    def would_begin(self, request: InitProcessGroupRequest) -> bool:
        """Return whether `request` would start a join: its generation is new and above all known ones."""
        self._promote()
        begun = {*self._joining, *([] if self._membership is None else [self._membership.request.generation])}
        return request.generation not in self._spent and request.generation > max(begun, default=-1)

    async def join(self, request: InitProcessGroupRequest, *, epoch: int = 0) -> ProcessGroupStatus:
        """Join, or wait for the join that the same request has begun; `epoch` is the latest that the engine knows.

        Raises:
            StaleGeneration: a later membership has formed, or this generation was used before.
            InvalidRequest: the generation is implausibly far above the one joined.
            Overloaded: too many joins wait for their peers.
            DeadlineExceeded: another rank did not join in time.
            PeerLost: another rank left while the group was forming.
        """
        self._promote()
        known, generation = self._membership, request.generation
        last = 0 if known is None else known.request.generation
        if known is not None and generation <= last:
            if not (known.usable and _same(known.request, request)):
                raise StaleGeneration(
                    f"generation must be above {last}, the last one joined, got {generation}",
                    param="generation",
                    known={"generation": last, "epoch": epoch},
                )
            return _status(request)
        if generation > last + MOST_GENERATION_STEP:
            raise InvalidRequest(
                f"generation must be at most {MOST_GENERATION_STEP} above {last}, the last one joined, got "
                f"{generation}; if it is correct, restart the engine",
                param="generation",
            )
        membership = self._begun(request)
        name = f"group {request.group!r} generation {generation}"
        if not await settled(membership.joining, timeout_s=request.timeout_s + 1.0):
            raise DeadlineExceeded(f"{name} did not form within {request.timeout_s:g} s: not every rank joined")
        self._promote()
        error = membership.joining.exception()
        if error is not None:
            raise as_contract(error)
        if not membership.usable:
            raise StaleGeneration(f"{name} was replaced while it formed", param="generation")
        return _status(request)

    def _begun(self, request: InitProcessGroupRequest) -> _Membership:
        generation, begun = request.generation, self._joining.get(request.generation)
        if generation in self._spent or (begun is not None and not _same(begun.request, request)):
            raise StaleGeneration(f"generation {generation} was already used; choose a higher one", param="generation")
        if begun is not None:
            return begun
        if len(self._joining) >= _MOST_JOINING:
            raise Overloaded(f"{len(self._joining)} joins wait for their peers already; wait until one has ended")
        known = (self._membership, *self._joining.values())
        leaving = [membership.left for membership in known if membership is not None and membership.left is not None]

        def join() -> GroupEndpoint:
            if request.backend is Backend.NCCL:  # a device that still receives for another group cannot join this one
                wait(leaving, timeout=request.timeout_s)
            return self._endpoints.join(request)

        joining = in_background_soon(f"join-{generation}", join)
        made = self._joining[generation] = _Membership(request, joining)
        loop = asyncio.get_running_loop()

        def ended(_: object) -> None:
            """Run on the join's thread: close a group that was left meanwhile, and have the loop promote the others."""
            made.close_if_left()
            tell(loop, self._promote)

        joining.add_done_callback(ended)
        return made

    def _promote(self) -> None:
        """Make the completed join with the highest generation the current membership, unless a later one is current."""
        ended = [joining for joining in self._joining.values() if joining.joining.done()]
        for candidate in sorted(ended, key=lambda one: one.request.generation):
            generation, before = candidate.request.generation, self._membership
            del self._joining[generation]
            if not candidate.formed or not candidate.usable:
                self._spent.append(generation)
            elif before is not None and generation < before.request.generation:
                candidate.leave()
            else:
                if before is not None:
                    self._on_replaced()
                    before.leave()
                self._membership = candidate

    def check(self, *, group: str | None, generation: int | None) -> None:
        """Raise `NotPrepared` or `StaleGeneration` unless exactly this group and generation is joined and usable."""
        self._promote()
        membership = self._membership
        if membership is None or not membership.usable:
            raise NotPrepared(
                "no process group is joined, or the last one was left; POST /init_process_group with a higher "
                "generation first",
                param="group",
            )
        joined = membership.request
        if generation is not None and generation < joined.generation:
            raise StaleGeneration(
                f"generation must be {joined.generation}, the one joined, got {generation}", param="generation"
            )
        if (group, generation) != (joined.group, joined.generation):
            raise NotPrepared(
                f"the group joined is {joined.group!r} generation {joined.generation}, the update names {group!r} "
                f"generation {generation}; POST /init_process_group first",
                param="generation",
            )

    def endpoint(self) -> tuple[GroupEndpoint, Callable[[], None]]:
        """Return the joined endpoint, and the function that leaves it for good. Call `check` first."""
        assert self._membership is not None
        return self._membership.joining.result(), self._membership.leave

    def leave(self) -> None:
        """Leave the membership and all joins for good, if there are any, on other threads."""
        self._promote()
        for membership in (self._membership, *self._joining.values()):
            if membership is not None:
                membership.leave()

    async def close(self) -> None:
        """Leave, and wait until the membership has been left."""
        self.leave()
        if self._membership is not None and self._membership.left is not None:
            await settled(self._membership.left, timeout_s=_LEAVES_S)


def _same(begun: InitProcessGroupRequest, request: InitProcessGroupRequest) -> bool:
    return request.model_copy(update={"timeout_s": begun.timeout_s}) == begun


def _status(request: InitProcessGroupRequest) -> ProcessGroupStatus:
    return ProcessGroupStatus(
        group=request.group, generation=request.generation, rank=request.rank, world_size=request.world_size
    )


def as_contract(error: BaseException) -> ContractError:
    """Convert the exception of a thread to a contract error."""
    if isinstance(error, ContractError):
        return error
    if isinstance(error, DeadlineError):
        return DeadlineExceeded(str(error))
    return PeerLost(str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}")
