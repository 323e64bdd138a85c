"""Loading of an environment by reference: an async function, a class with `reset`, `step` and `close`, or a server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Final

from pipelinerl import registry
from pipelinerl.component import imported
from pipelinerl.errors import ReferenceFailed
from pipelinerl.plugins.episodes.client import EpisodeClient
from pipelinerl.plugins.episodes.environment import Environment, EnvironmentStep, Task
from pipelinerl.system.references import load_reference, position_of
from pipelinerl.system.returned_values import MOST_REWARD, NotAReward, described, reward_of

#: Function that plays one episode, and returns a reward, a bool, a `Verdict`, or None.
Play = Callable[[Task, EpisodeClient], Awaitable[Any]]
_NO_OPTIONS: Final[Mapping[str, Any]] = MappingProxyType({})


def load_play(reference: str, options: Mapping[str, Any] = _NO_OPTIONS) -> Play:
    """Return the function that plays an episode; `options` are keyword arguments of the user's function or class.

    Raises `ReferenceFailed` if `reference` cannot be loaded, is no async function or environment, or rejects options.
    """
    name, _, argument = reference.partition(":")
    if name in registry.ENVIRONMENTS:
        registered: Play = registry.load("environment", registry.ENVIRONMENTS, name)(argument, options)
        return registered
    thing = load_reference(reference)
    if hasattr(thing, "step") and hasattr(thing, "reset"):
        _refuse_unknown(reference, thing, (), options)
        return _loop_around(partial(thing, **options))
    if not inspect.iscoroutinefunction(thing):
        raise ReferenceFailed(
            f"{reference} must be an async function of (task, client), or a class with reset, step and close; code "
            "that blocks can be called by asyncio.to_thread"
        )
    _refuse_unknown(reference, thing, ("task", "client"), options)
    play: Play = partial(thing, **options)
    return play


def check_playable(reference: str, options: Mapping[str, Any] = _NO_OPTIONS) -> None:
    """Raise `ReferenceFailed` or `RecipeError` if episodes of the environment cannot be played here; start nothing."""
    name, _, argument = reference.partition(":")
    component = registry.ENVIRONMENTS.get(name)
    if component is not None and component.check:
        registry.find("environment", registry.ENVIRONMENTS, name)
        imported(component.check)(argument, options)
    else:
        load_play(reference, options)


def place_of_play(reference: str) -> str:
    """Return the place of an environment for error messages: file, line and name of user code, else its reference."""
    if reference.partition(":")[0] in registry.ENVIRONMENTS:
        return reference
    return position_of(load_reference(reference))


def _refuse_unknown(reference: str, thing: Any, names: tuple[str, ...], options: Mapping[str, Any]) -> None:
    signature = inspect.signature(thing)
    try:
        signature.bind(*names, **options)
    except TypeError as error:
        expected = f"({', '.join([*names, *options])})"
        raise ReferenceFailed(f"{reference} must take {expected}, got {signature}: {error}") from None


def _loop_around(kind: Any) -> Play:
    async def play(task: Task, client: EpisodeClient) -> float:
        environment: Environment = kind()
        try:
            messages = _messages(await _called(environment.reset, task, task.seed) or task.messages)
            while True:
                answer = await client.chat(messages)
                step = _step(await _called(environment.step, answer))
                if step.reward:
                    await client.reward(step.reward)
                if step.done:
                    return 0.0  # adds nothing to the rewards already reported for the turns
                messages += [answer, *step.messages]
        finally:
            if hasattr(environment, "close"):
                await _called(environment.close)

    return play


async def _called(method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method; a method that is not async runs in a thread, so that it does not block the event loop."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)

    def called() -> Any:
        try:
            return method(*arguments)
        except StopIteration as error:  # no future can hold it
            raise RuntimeError("the method raised StopIteration").with_traceback(error.__traceback__) from error

    return await asyncio.to_thread(called)


def _messages(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    return [value] if isinstance(value, Mapping) else list(value or ())


def _step(value: Any) -> EnvironmentStep:
    messages: Any
    reward: Any
    done: Any
    if isinstance(value, EnvironmentStep):
        messages, reward, done = value.messages, value.reward, value.done
    elif isinstance(value, tuple) and len(value) == 3:
        messages, reward, done = value
    else:
        raise TypeError(
            f"step must return an EnvironmentStep, or (messages, reward, done), it returned {described(value)}"
        )
    try:
        reward = 0.0 if reward is None else reward_of(reward)
    except NotAReward as error:
        raise TypeError(f"step must return a finite number within ±{MOST_REWARD:g} as reward, it is {error}") from None
    try:
        done = done is not None and bool(reward_of(done))  # a text such as "False" would count as true
    except NotAReward as error:
        raise TypeError(f"step must return True or False as done, it is {error}") from None
    return EnvironmentStep(messages=_messages(messages), reward=reward, done=done)
