"""Loading of a user's environment by reference: an async function, or a class with `reset`, `step` and `close`."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pipelinerl.environments.client import EpisodeClient
from pipelinerl.environments.environment import Environment, EnvironmentStep, Task
from pipelinerl.errors import ReferenceFailed
from pipelinerl.system.references import load_reference

#: Plays one episode: returns a reward, a bool, a `Verdict`, or None.
Play = Callable[[Task, EpisodeClient], Awaitable[Any]]


def load_play(reference: str) -> Play:
    """Return the function that plays an episode.

    Raises:
        ReferenceFailed: the reference cannot be loaded, or is neither an async function nor an environment.
    """
    thing = load_reference(reference)
    if hasattr(thing, "step") and hasattr(thing, "reset"):
        return _loop_around(thing)
    if not inspect.iscoroutinefunction(thing):
        raise ReferenceFailed(
            f"{reference} must be an async function of (task, client), or a class with reset, step and close; code "
            "that blocks can be called by asyncio.to_thread"
        )
    if len([each for each in inspect.signature(thing).parameters.values() if each.default is each.empty]) != 2:
        raise ReferenceFailed(f"{reference} must take (task, client), got {inspect.signature(thing)}")
    play: Play = thing
    return play


def _loop_around(kind: Any) -> Play:
    async def play(task: Task, client: EpisodeClient) -> float:
        environment: Environment = kind()
        try:
            messages = list(await _called(environment.reset, task, task.seed) or task.messages)
            while True:
                answer = await client.chat(messages)
                step = _step(await _called(environment.step, answer))
                if step.reward:
                    await client.reward(step.reward)
                if step.done:
                    return 0.0  # the turns' own rewards are added to this one
                messages += [answer, *step.messages]
        finally:
            if hasattr(environment, "close"):
                await _called(environment.close)

    return play


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method and return its result. A method that is not async runs in a thread: episodes share one event loop,
    which must not be blocked.
    """
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    return await asyncio.to_thread(method, *arguments)


def _step(value: Any) -> EnvironmentStep:
    if isinstance(value, EnvironmentStep):
        return value
    if isinstance(value, tuple) and len(value) == 3:
        messages, reward, done = value
        return EnvironmentStep(
            messages=[messages] if isinstance(messages, Mapping) else messages, reward=reward, done=done
        )
    raise TypeError(
        f"step must return an EnvironmentStep, or (messages, reward, done), it returned {type(value).__name__}"
    )
