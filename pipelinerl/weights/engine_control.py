"""Control of engines by publishers: the contract's two control routes per engine, or one announcement for many engines.

`Preparation` sends each engine the layout only once.
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
    """The contract's two control routes, addressed by the engine's base URL.

    Methods raise the `ContractError` with which the engine answered, or a `PipelineError` if it could not be reached.
    """

    async def init_process_group(self, url: str, request: InitProcessGroupRequest) -> ProcessGroupStatus:
        """Send POST /init_process_group."""
        ...

    async def request_weight_update(self, url: str, request: WeightUpdateRequest) -> WeightUpdateResponse:
        """Send POST /request_weight_update."""
        ...


class Announcer(Protocol):
    """Announces a version to many engines at once, without a request to each of them.

    The result of `tell` names the engines that answered; the publisher sends requests to the others.
    """

    async def tell(
        self, prepare: WeightUpdateRequest, engines: Sequence[str], *, left_out: Sequence[str], deadline: float
    ) -> dict[str, WeightUpdateResponse | Failure]:
        """Announce the version of `prepare`, and wait for the engines that follow announcements.

        Args:
            prepare: for the transport `pull`, with only the layout's id; each engine starts with a different source.
            engines: base URLs of the engines that are to serve the version.
            left_out: base URLs of engines that follow announcements but are not to serve it.
            deadline: in monotonic seconds.

        Returns:
            By base URL, what each engine serves now, or why it failed. Engines that did not answer are missing.
        """
        ...


@final
class Preparation:
    """Sends PREPARE, with only the layout's id where the engine already knows the layout."""

    def __init__(self, control: EngineControl) -> None:
        self._control = control
        self._knows: dict[str, str] = {}

    async def prepare(
        self, url: str, layout: WeightLayout, request: Callable[..., WeightUpdateRequest]
    ) -> WeightUpdateResponse:
        """Send the PREPARE that `request` builds from its argument `layout` or `layout_id`."""
        if self._knows.get(url) == layout.layout_id:
            try:
                return await self._control.request_weight_update(url, request(layout_id=layout.layout_id))
            except NotPrepared as error:
                if error.param != "layout_id":
                    raise
        answer = await self._control.request_weight_update(url, request(layout=layout))
        self._knows[url] = layout.layout_id
        return answer
