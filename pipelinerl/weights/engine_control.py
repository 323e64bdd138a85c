"""How publishers reach engines: by the contract's two control routes, one by one, or many at once by an announcement.

PREPARE carries the layout once to each engine (`Preparation`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, final

from inference_contract.errors import NotPrepared
from inference_contract.weights import (
    InitProcessGroupRequest,
    ProcessGroupStatus,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.weights.fan_out import Failure


class EngineControl(Protocol):
    """The contract's two control routes, by the engine's base URL.

    Raises a `ContractError` that the engine answered with, or a `PipelineError` if it could not be asked.
    """

    async def init_process_group(self, url: str, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """POST /init_process_group."""
        ...

    async def request_weight_update(self, url: str, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """POST /request_weight_update."""
        ...


class Announcer(Protocol):
    """Tells many engines at once that there is a version to pull, without a request to each.

    Whom it reaches, and who says nothing, is told by what `tell` returns; the others are asked one by one.
    """

    async def tell(
        self, prepare: WeightUpdateRequest, engines: Sequence[str], *, left_out: Sequence[str], deadline: float
    ) -> dict[str, WeightUpdateResponse | Failure]:
        """Announce the version that `prepare` is about, and wait for the engines that follow announcements.

        Args:
            prepare: by the transport `pull`, with the layout's id alone; each engine begins with another of its
                sources.
            engines: base URLs of those who are to serve it.
            left_out: of those who follow announcements, too, and are not to.
            deadline: in monotonic seconds.

        Returns:
            By base URL, what each of them serves now, or why it does not. Who has said nothing is not among them.
        """
        ...


@final
class Preparation:
    """Sends PREPARE, with the layout's id alone where the engine has seen it."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._knows: dict[str, str] = {}

    async def prepare(
        self, url: str, layout: WeightLayout, request: Callable[..., WeightUpdateRequest]
    ) -> WeightUpdateResponse:
        """`request` makes the PREPARE from its field `layout` or `layout_id`."""
        if self._knows.get(url) == layout.layout_id:
            try:
                return await self._control.request_weight_update(url, request(layout_id=layout.layout_id))
            except NotPrepared as error:
                if error.param != "layout_id":
                    raise
        answer = await self._control.request_weight_update(url, request(layout=layout))
        self._knows[url] = layout.layout_id
        return answer
