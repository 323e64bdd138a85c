"""The two control routes of the contract as publishers call them, and PREPARE with the layout sent once per engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, final

from inference_contract.errors import NotPrepared
from inference_contract.weights import (
    InitProcessGroupRequest,
    ProcessGroupStatus,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)


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
