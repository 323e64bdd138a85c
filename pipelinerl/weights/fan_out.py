"""`each`: calls every engine concurrently and returns errors as results.

One failing engine therefore does not end the calls to the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from inference_contract.errors import ContractError, Persistence
from pipelinerl.errors import PipelineError

T = TypeVar("T")

_MOMENT_S: Final = 0.03

#: The ways in which a call to an engine can fail: the engine reports an error, or it cannot be reached.
Failure = ContractError | PipelineError


async def _guarded(call: Awaitable[T]) -> T | Failure:
    try:
        return await call
    except (ContractError, PipelineError) as error:
        return error


def lasting(failures: Mapping[str, object]) -> set[str]:
    """Return the engines whose failure is permanent by their own report, so that a retry cannot help."""
    return {
        url
        for url, error in failures.items()
        if isinstance(error, ContractError) and error.persistence is Persistence.PERMANENT
    }


async def each(urls: Iterable[str], call: Callable[[str], Awaitable[T]]) -> dict[str, T | Failure]:
    """Call every engine concurrently; return errors as results."""
    listed = list(urls)
    answers = await asyncio.gather(*(_guarded(call(url)) for url in listed))
    return dict(zip(listed, answers, strict=True))


async def each_until_failure(
    urls: Iterable[str], call: Callable[[str], Awaitable[T]], *, victim: tuple[type[Failure], ...]
) -> dict[str, T | Failure]:
    """Call every engine like `each`, but cancel the rest after a failure and leave them out of the result.

    This is for calls that wait for one another. A failure of a kind in `victim` only says that another engine did not
    come: the function then keeps waiting for that engine, so that it can be named.
    """
    tasks = {url: asyncio.ensure_future(_guarded(call(url))) for url in urls}
    waiting = set(tasks.values())
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.result() for task in done if isinstance(task.result(), Exception)]
            if not all(isinstance(failure, victim) for failure in failures):
                # Other engines that cannot be reached report so within a moment.
                await asyncio.wait(tasks.values(), timeout=_MOMENT_S)
                break
    finally:
        for task in tasks.values():
            task.cancel()
    return {url: task.result() for url, task in tasks.items() if task.done() and not task.cancelled()}
