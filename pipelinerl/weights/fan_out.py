"""`each`: one call to every engine at once, whose errors are answers rather than the end of the others."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Final, TypeVar

from inference_contract.errors import ContractError, Persistence
from pipelinerl.errors import PipelineError

T = TypeVar("T")

_MOMENT_S: Final = 0.03

#: How a call to an engine may end without its answer: the engine said so, or could not be asked.
Failure = ContractError | PipelineError


async def _guarded(call: Awaitable[T]) -> T | Failure:
    try:
        return await call
    except (ContractError, PipelineError) as error:
        return error


def lasting(failures: Mapping[str, object]) -> set[str]:
    """The engines, of those whose calls failed, for whom no retry mends it: they have said so."""
    return {
        url
        for url, error in failures.items()
        if isinstance(error, ContractError) and error.persistence is Persistence.PERMANENT
    }


async def each(urls: Iterable[str], call: Callable[[str], Awaitable[T]]) -> dict[str, T | Failure]:
    """Call for every engine at once; errors are answers."""
    listed = list(urls)
    answers = await asyncio.gather(*(_guarded(call(url)) for url in listed))
    return dict(zip(listed, answers, strict=True))


async def each_until_failure(
    urls: Iterable[str], call: Callable[[str], Awaitable[T]], *, victim: tuple[type[Failure], ...]
) -> dict[str, T | Failure]:
    """Do as `each`, for calls that wait for one another: a failure ends the rest, which are left out of the answer.

    A failure of the kinds `victim` says only that another did not come: then that other is waited for, to be named.
    """
    tasks = {url: asyncio.ensure_future(_guarded(call(url))) for url in urls}
    waiting = set(tasks.values())
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            failures = [task.result() for task in done if isinstance(task.result(), Exception)]
            if not all(isinstance(failure, victim) for failure in failures):
                # Others that cannot be reached either say so within a moment.
                await asyncio.wait(tasks.values(), timeout=_MOMENT_S)
                break
    finally:
        for task in tasks.values():
            task.cancel()
    return {url: task.result() for url, task in tasks.items() if task.done() and not task.cancelled()}
