"""Where problems come from: the source that a recipe names is opened here, by its name in the registry.

To add a source to the package, write a function `(SourceRequest) -> ProblemSource` and a line in `registry.SOURCES`.
A user's own is a function of its `parameters` that returns problems, in a file of the user's (`user_source.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipelinerl import registry
from pipelinerl.data.drafts import Split
from pipelinerl.data.prompts import NO_PROMPTS, Prompts
from pipelinerl.data.source import ProblemSource, SourceRequest
from pipelinerl.data.user_source import open_users

__all__ = ["ProblemSource", "Split", "open_source"]


def open_source(
    source: str,
    *,
    domain: str,
    split: Split,
    seed: int,
    parameters: Mapping[str, Any] | None = None,
    prompts: Prompts = NO_PROMPTS,
) -> ProblemSource:
    """The source that a recipe names: a registered one, with what follows its colon, or else a user's own.

    Raises:
        RecipeError: the source is unknown, its parameters are wrong, or its file is.
    """
    name, argument = _name_of(source)
    registered = name in registry.SOURCES
    opener = registry.load(f"domains.{domain}.source", registry.SOURCES, name)
    asked = SourceRequest(
        argument=argument,
        domain=domain,
        split=split,
        seed=seed,
        parameters=dict(parameters or {}),
        prompts=prompts,
    )
    if registered:
        opened: ProblemSource = opener(asked)
        return opened
    return open_users(opener, asked)


def check_source(source: str, *, domain: str) -> None:
    """Look at the name alone; of a user's source, the file is imported.

    Raises:
        RecipeError: the source is unknown, or a package that it needs is not installed.
    """
    registry.find(f"domains.{domain}.source", registry.SOURCES, _name_of(source)[0])


def _name_of(source: str) -> tuple[str, str]:
    """The name in the registry, and what follows its colon; or a user's reference, which has a colon of its own."""
    name, _, argument = source.partition(":")
    return (name, argument) if name in registry.SOURCES else (source, "")
