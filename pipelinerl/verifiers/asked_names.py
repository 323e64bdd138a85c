"""What a user's function asks for: its parameters, by name, among those that can be had."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelinerl.errors import RecipeError


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Its parameters.

    Raises:
        RecipeError: it is of a kind that does not tell them.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the parameters of {function!r} cannot be told: {error}") from None


def lacking(parameters: Iterable[inspect.Parameter], known: Iterable[str]) -> list[str]:
    """Those that it cannot do without, and that nobody can give it by name."""
    names = frozenset(known)
    return [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and (each.name not in names or each.kind is each.POSITIONAL_ONLY)
    ]


def asked_names(parameters: Sequence[inspect.Parameter], known: Iterable[str]) -> tuple[str, ...]:
    """Which of `known` it takes by name: all of them, if it takes any keyword."""
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    return tuple(name for name in known if everything or name in names)
