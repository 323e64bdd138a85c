"""Control of engines by publishers: by requests to two routes of each engine, or by one announcement to many engines.

`Preparation` sends the layout to each engine only once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, Protocol, TypeVar

from inference_contract.errors import ContractError, NotPrepared, Persistence
from inference_contract.weights import (
    InitProcessGroupRequest,
    ProcessGroupStatus,
    WeightLayout,
    WeightUpdateRequest,
    WeightUpdateResponse,
)
from pipelinerl.errors import PipelineError


class EngineControl(Protocol):
    """Calls the two control routes of the inference contract on an engine, by base URL. Methods raise the engine's
    `ContractError`, or a `PipelineError` if it could not be reached.
    """

    async def init_process_group(self, url: str, request: InitProcessGroupRequest) -> ProcessGroupStatus: ...

    async def request_weight_update(self, url: str, request: WeightUpdateRequest) -> WeightUpdateResponse: ...


class Preparation:
    """Sends PREPARE, the first request of a weight update; engines that know the layout get only the layout's id."""

    def __init__(self, control: EngineControl, *, on_restart: Callable[[str], None] = lambda url: None) -> None:
        self._control = control
        self._on_restart = on_restart
        self._knows: dict[str, str] = {}

    async def prepare(
        self, url: str, layout: WeightLayout, request: Callable[..., WeightUpdateRequest]
    ) -> WeightUpdateResponse:
        """Send a PREPARE, with only the layout's id if the engine knows it; if it turns out not to, send the layout.
        `request` builds the message from `layout=…` or `layout_id=…`.
        """
        if self._knows.get(url) == layout.layout_id:
            try:
                return await self._control.request_weight_update(url, request(layout_id=layout.layout_id))
            except NotPrepared as error:
                if error.param != "layout_id":
                    raise
                self._on_restart(url)
        answer = await self._control.request_weight_update(url, request(layout=layout))
        self._knows[url] = layout.layout_id
        return answer


T = TypeVar("T")

_MOMENT_S: Final = 0.03

#: Failure of a call to an engine: the engine reports an error, or it cannot be reached.
Failure = ContractError | PipelineError


async def guarded(call: Callable[[str], Awaitable[T]], url: str) -> T | Failure:
    """Call an engine, and return its answer or the error with which the call failed."""
    try:
        return await call(url)
    except (ContractError, PipelineError) as error:
        return error


def lasting(failures: Mapping[str, object]) -> set[str]:
    """Return the engines that reported their failure as permanent, so that a retry cannot help."""
    return {
        url
        for url, error in failures.items()
        if isinstance(error, ContractError) and error.persistence is Persistence.PERMANENT
    }


async def each(urls: Iterable[str], call: Callable[[str], Awaitable[T]]) -> dict[str, T | Failure]:
    """Call all engines concurrently; return results by URL, with an exception as the result of a failed call."""
    listed = list(urls)
    answers = await asyncio.gather(*(guarded(call, url) for url in listed))
    return dict(zip(listed, answers, strict=True))


async def each_until_failure(
    urls: Iterable[str], call: Callable[[str], Awaitable[T]], *, victim: tuple[type[Failure], ...]
) -> dict[str, T | Failure]:
    """Call all engines like `each`, but cancel unfinished calls after a failure, except one of a type in `victim`,
    which is the consequence of another engine's.
    """
    # In calls that wait for one another, an error of a type in `victim` only says that another engine is missing.
    # Continue after such an error, in order to find and name the missing engine.
    tasks = {url: asyncio.ensure_future(guarded(call, url)) for url in urls}
    waiting = set(tasks.values())
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.result() for task in done if isinstance(task.result(), Exception)]
            if not all(isinstance(failure, victim) for failure in failures):
                # Other calls may fail at nearly the same time: wait a moment, so that all unreachable engines are
                # named.
                await asyncio.wait(tasks.values(), timeout=_MOMENT_S)
                break
    finally:
        for task in tasks.values():
            task.cancel()
    return {url: task.result() for url, task in tasks.items() if task.done() and not task.cancelled()}
