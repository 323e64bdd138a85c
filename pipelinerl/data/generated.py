"""Generated problems: additions, and tasks of reasoning-gym.

Validation and held-out problems are distinct; training problems may repeat.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec

from pipelinerl import rng
from pipelinerl.component import SourceComponent
from pipelinerl.data.source import Draft, SourceRequest, Split, split_of, to_problem
from pipelinerl.errors import RecipeError
from pipelinerl.system import gym_tasks
from pipelinerl.types import Message, Problem

_MAX_DRAWS: Final = 10_000
#: Number of problems of a reasoning-gym data set.
NUM_ENTRIES: Final = 2**31 - 1


Parameters = TypeVar("Parameters")


def _refuse_argument(request: SourceRequest, source: str) -> None:
    if request.argument:
        raise RecipeError(
            f"{request.where}.source must be {source} without an argument, got {source}:{request.argument}"
        )


def parameters_of(request: SourceRequest, kind: type[Parameters], *, source: str) -> Parameters:
    """Convert the parameters of a built-in generator to the struct `kind`. Raises `RecipeError` if one is invalid."""
    _refuse_argument(request, source)
    try:
        return msgspec.convert(dict(request.parameters), kind)
    except msgspec.ValidationError as error:
        raise RecipeError(f"{request.where}.parameters: {error}") from None


class GeneratedSource:
    """The problems of a generator that belong to one split.

    `draw` is a pure function from a 63-bit key to a draft (a problem before its split is known). Drafts are skipped if
    their ground truth does not match `pattern` from start to end.
    """

    def __init__(
        self, draw: Callable[[int], Draft], request: SourceRequest, *, pattern: re.Pattern[str] | None = None
    ) -> None:
        self._draw = draw
        self._request = request
        self._pattern = pattern
        # Validation and held-out problems must be distinct, so they are enumerated in order and cached.
        self._seen: set[tuple[Message, ...]] = set()
        self._in_order: list[Draft] = []
        self._tried = 0

    def problem(self, index: int) -> Problem:
        """Return problem `index`. Raises `RecipeError` if the generator has too few problems of the split."""
        request = self._request
        if request.split is Split.TRAIN:
            draft = self._fitting(index)
        else:
            while len(self._in_order) <= index:
                self._add_distinct()
            draft = self._in_order[index]
        return request.prompts.dress(to_problem(draft, request.domain))

    def _fitting(self, index: int) -> Draft:
        for attempt in range(_MAX_DRAWS):
            draft = self._drawn(index, attempt)
            if self._fits(draft):
                return draft
        raise RecipeError(
            f"{self._request.where}: none of {_MAX_DRAWS} problems fitted the {self._request.split} split; "
            "widen the parameters or answer_pattern"
        )

    def _add_distinct(self) -> None:
        for _ in range(_MAX_DRAWS):
            draft = self._drawn(self._tried)
            self._tried += 1
            if self._fits(draft) and draft.messages not in self._seen:
                self._seen.add(draft.messages)
                self._in_order.append(draft)
                return
        raise RecipeError(
            f"{self._request.where}: the {self._request.split} split seems to hold only {len(self._in_order)} distinct "
            "problems; lower evaluation.problems, or widen the parameters"
        )

    def _drawn(self, *place: int) -> Draft:
        return self._draw(rng.key(self._request.seed, self._request.split, *place))

    def _fits(self, draft: Draft) -> bool:
        right_split = split_of(draft.messages) is self._request.split
        return right_split and (self._pattern is None or self._pattern.fullmatch(draft.ground_truth) is not None)


def open_addition(request: SourceRequest) -> GeneratedSource:
    """Open the source `addition`: additions such as `12+345=` → `357`, with up to `max_digits` digits."""
    _refuse_argument(request, "addition")
    parameters, pattern = _without_pattern(request)
    max_digits = parameters.get("max_digits", 3)
    if parameters.keys() - {"max_digits"} or not isinstance(max_digits, int) or not 1 <= max_digits <= 18:
        raise RecipeError(f"{request.where}.parameters takes max_digits, 1 to 18, got {parameters!r}")

    def draw(key: int) -> Draft:
        noise = rng.generator(key, "addition")
        a, b = (int(noise.integers(10 ** int(noise.integers(1, max_digits + 1)))) for _ in range(2))
        return Draft(messages=(Message("user", f"{a}+{b}="),), ground_truth=str(a + b), metadata={})

    return GeneratedSource(draw, request, pattern=pattern)


def open_reasoning_gym(request: SourceRequest) -> GeneratedSource:
    """Open the source `reasoning_gym:<task>`.

    A draft's metadata holds (task, parameters, index), from which `verifiers/reasoning_gym.py` recreates the entry.
    Raises `RecipeError` if the library is not installed, or rejects the task or a parameter.
    """
    task, where = request.argument, request.where
    if not task:
        raise RecipeError(f"{where}.source must be reasoning_gym:<task>, got no task")
    parameters, pattern = _without_pattern(request)
    if reserved := {"seed", "size"} & parameters.keys():
        raise RecipeError(f"{where}.parameters must not set {', '.join(sorted(reserved))}: the run's seed decides")
    try:
        dataset = gym_tasks.create_dataset(task, seed=0, size=NUM_ENTRIES, **parameters)
    except ModuleNotFoundError:
        raise RecipeError(
            f"{where}.source needs reasoning_gym, which is not installed; pip install -e '.[gym]'"
        ) from None
    except (ValueError, TypeError, AssertionError) as error:
        raise RecipeError(f"{where}: reasoning-gym refuses task {task!r} with {parameters!r}: {error}") from None

    def draw(key: int) -> Draft:
        index = key % NUM_ENTRIES
        entry = dataset[index]
        return Draft(
            messages=(Message("user", entry["question"]),),
            ground_truth=str(entry["answer"]),
            metadata={"task": task, "parameters": parameters, "index": index},
        )

    return GeneratedSource(draw, request, pattern=pattern)


def _without_pattern(request: SourceRequest) -> tuple[dict[str, Any], re.Pattern[str] | None]:
    """Return the parameters without `answer_pattern`, and `answer_pattern` as a regular expression, or None."""
    parameters = dict(request.parameters)
    answer_pattern = parameters.pop("answer_pattern", None)
    try:
        return parameters, None if answer_pattern is None else re.compile(answer_pattern)
    except (re.error, TypeError) as error:
        raise RecipeError(f"{request.where}.parameters.answer_pattern must be a regular expression: {error}") from None


REASONING_GYM: Final = SourceComponent(
    build=f"{__name__}:open_reasoning_gym", needs=("reasoning_gym",), remedy="pip install -e '.[gym]'"
)
ADDITION: Final = SourceComponent(build=f"{__name__}:open_addition")
