"""Problems of the reasoning-gym library: procedural generators, each with its own scorer.

A problem carries (task, parameters, index) as metadata, from which `verifiers/reasoning_gym.py` makes the same entry
again: small on the wire, and no entry has to survive serialisation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pipelinerl.data.drafts import Draft
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message

#: Entries that a task can make; every index below it is a problem.
NUM_ENTRIES: Final = 2**31 - 1


def drafts(task: str, parameters: Mapping[str, Any], *, where: str) -> Callable[[int], Draft]:
    """Drafts of a reasoning-gym task; `parameters` are those of the task's configuration class.

    Raises:
        RecipeError: the library is absent, or does not know the task or a parameter.
    """
    reserved = {"seed", "size"} & set(parameters)
    if reserved:
        raise RecipeError(f"{where}.parameters must not set {', '.join(sorted(reserved))}: the run's seed decides")
    try:
        import reasoning_gym
    except ModuleNotFoundError:
        raise RecipeError(f"{where}.source needs reasoning_gym, which is not installed; pip install it") from None
    try:
        dataset = reasoning_gym.create_dataset(task, seed=0, size=NUM_ENTRIES, **parameters)
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(f"{where}: reasoning-gym refuses task {task!r} with {dict(parameters)!r}: {error}") from None

    def draw(key: int) -> Draft:
        index = key % NUM_ENTRIES
        entry = dataset[index]
        return Draft(
            messages=(Message("user", entry["question"]),),
            ground_truth=str(entry["answer"]),
            metadata={"task": task, "parameters": dict(parameters), "index": index},
        )

    return draw
