"""The source `numbered`: tasks 0, 1, 2, … of an environment that has its own tasks."""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np

from pipelinerl.data.generated import parameters_of
from pipelinerl.data.source import Draft, ShuffledEpochs, SourceRequest, split_of_text, to_problem
from pipelinerl.errors import RecipeError
from pipelinerl.types import Message, Problem


class _Numbers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    count: Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
    """Number of tasks."""
    prompt: Annotated[str, msgspec.Meta(min_length=1)] | None = None
    """Text of every problem's message; by default `Task` and the number."""


def open_numbered(request: SourceRequest) -> NumberedSource:
    """Open the source `numbered`. Raises `RecipeError` for invalid parameters, or a split without tasks."""
    return NumberedSource(parameters_of(request, _Numbers, source="numbered"), request)


class NumberedSource:
    """Tasks 0 to `count` − 1 of an environment that has its own tasks; `metadata["index"]` is the task's number.

    The hash of the number decides the split. Training tasks come in epochs, each in its own order.
    """

    def __init__(self, numbers: _Numbers, request: SourceRequest) -> None:
        self._numbers = numbers
        self._request = request
        of_split = [each for each in range(numbers.count) if split_of_text(str(each)) is request.split]
        if not of_split:
            raise RecipeError(
                f"{request.where}: the {request.split} split has none of {numbers.count} tasks; raise parameters.count"
            )
        self._tasks = ShuffledEpochs(
            np.array(of_split), request, name="numbered", what="tasks", remedy="raise parameters.count"
        )

    def problem(self, index: int) -> Problem:
        """Return problem `index`. Raises `RecipeError` past the end of a validation or held-out split."""
        request, number = self._request, self._tasks.item(index)
        message = Message("user", self._numbers.prompt or f"Task {number}")
        draft = Draft(messages=(message,), ground_truth="", metadata={"index": number})
        return request.prompts.dress(to_problem(draft, request.domain, name=str(number)))
