"""`GroupMember`: an engine's endpoint in the weight group, as a sequence of memberships ordered by generation.

Promises: at most one membership is usable; joining happens on a thread, never on the event loop; a membership that
failed or was left is never used again (its prefix in the store is spent), so the way on is a higher generation.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import final

from inference_contract.errors import ContractError, DeadlineExceeded, NotPrepared, PeerLost, StaleGeneration
from inference_contract.weights import InitProcessGroupRequest, ProcessGroupStatus
from pipelinerl.engines.weights.group_endpoint import EndpointFactory, GroupEndpoint
from pipelinerl.errors import DeadlineError, PipelineError
from pipelinerl.system.background import in_background, settled


@dataclass(slots=True)
class _Membership:
    request: InitProcessGroupRequest
    joining: Future[GroupEndpoint]
    usable: bool = True

    def close_if_left(self) -> None:
        # A join cannot be interrupted: one that was given up meanwhile is closed when it turns up.
        if not self.usable and self.joining.done() and self.joining.exception() is None:
            self.joining.result().close()


@final
class GroupMember:
    """Used from one event loop."""

    def __init__(self, endpoints: EndpointFactory) -> None:
        self._endpoints = endpoints
        self._membership: _Membership | None = None

    def replaced_by(self, request: InitProcessGroupRequest) -> bool:
        """Returns whether `request` begins a new membership."""
        return self._membership is None or request.generation > self._membership.request.generation

    async def join(self, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """Join, or wait for the join that the same request has begun.

        Raises:
            StaleGeneration: a later membership is known, or this one has failed or was left.
            DeadlineExceeded, PeerLost: another rank did not come, or broke off.
        """
        known = self._membership
        if known is None or request.generation > known.request.generation:
            self.leave()
            known = _Membership(
                request, in_background(f"join-{request.generation}", lambda: self._endpoints.join(request))
            )
            known.joining.add_done_callback(lambda _, new=known: new.close_if_left())  # type: ignore[misc]
            self._membership = known
        elif not known.usable or request.model_copy(update={"timeout_s": known.request.timeout_s}) != known.request:
            raise StaleGeneration(
                f"generation must be above {known.request.generation}, the last one seen, got {request.generation}",
                param="generation",
            )
        return await self._joined(known, request.timeout_s)

    async def _joined(self, membership: _Membership, timeout_s: float) -> ProcessGroupStatus:
        request = membership.request
        name = f"group {request.group!r} generation {request.generation}"
        if not await settled(membership.joining, timeout_s=timeout_s + 1.0):
            raise DeadlineExceeded(f"{name} did not form within {timeout_s:g} s: not every rank came")
        error = membership.joining.exception()
        if error is not None:
            membership.usable = False
            raise as_contract(error)
        if not membership.usable:
            raise StaleGeneration(f"{name} was replaced while it formed", param="generation")
        return ProcessGroupStatus(
            group=request.group, generation=request.generation, rank=request.rank, world_size=request.world_size
        )

    def check(self, *, group: str | None, generation: int | None) -> None:
        """Raise unless exactly this membership is joined and usable."""
        membership = self._membership
        if membership is None or not membership.usable or not membership.joining.done():
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

    def endpoint(self) -> GroupEndpoint:
        """The endpoint that is joined; `check` must have passed."""
        assert self._membership is not None
        return self._membership.joining.result()

    def leave(self) -> None:
        """Leave the membership for good; without one, nothing happens."""
        if self._membership is not None:
            self._membership.usable = False
            self._membership.close_if_left()


def as_contract(error: BaseException) -> ContractError:
    """What a thread ended with, as an answer."""
    if isinstance(error, ContractError):
        return error
    if isinstance(error, DeadlineError):
        return DeadlineExceeded(str(error))
    return PeerLost(str(error) if isinstance(error, PipelineError) else f"{type(error).__name__}: {error}")
