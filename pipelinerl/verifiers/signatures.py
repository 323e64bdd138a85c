"""Inspection of a user's function: which of the offered values it takes as parameters, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelinerl.errors import RecipeError


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the function's parameters.

    Raises:
        RecipeError: they cannot be inspected.
    """
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise RecipeError(f"the parameters of {function!r} cannot be inspected: {error}") from None


def lacking(parameters: Iterable[inspect.Parameter], known: Iterable[str]) -> list[str]:
    """Return required parameters that cannot be passed by name, or are not in `known`."""
    names = frozenset(known)
    return [
        each.name
        for each in parameters
        if each.default is each.empty
        and each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
        and (each.name not in names or each.kind is each.POSITIONAL_ONLY)
    ]


def accepted_names(parameters: Sequence[inspect.Parameter], known: Iterable[str]) -> tuple[str, ...]:
    """Return the names in `known` that the function takes; all of `known` if it takes arbitrary keywords."""
    everything = any(each.kind is each.VAR_KEYWORD for each in parameters)
    names = {each.name for each in parameters if each.kind is not each.POSITIONAL_ONLY}
    return tuple(name for name in known if everything or name in names)
