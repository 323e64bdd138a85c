"""The source `programs`: small Python programs to write, each with its own tests, for the verifier `oubliette`.

    parameters = { operations = 1, max_number = 9, tests = 3 }

A problem describes in words a function of the number that the program reads: "x times 7", or with two operations "(the
larger of x and 7) minus 3". Problem i is a pure function of split, seed and i. Its ground truth is a program that
passes the tests. The first test's input is a number that the function changes, so printing the input fails. A tag gives
the number of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Final, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from pipelinerl import rng
from pipelinerl.data.drafts import Draft
from pipelinerl.data.generated import GeneratedSource, parameters_of
from pipelinerl.data.source import SourceRequest
from pipelinerl.types import Message

_REQUEST: Final = "Write a program that reads a number x and prints {}."
_PROGRAM: Final = "```\nx = int(input())\nprint({})\n```"


class _Operation(NamedTuple):
    """An operation on a number, in words, as code and as a function; `{0}` is its operand, `{1}` the other number."""

    words: str
    code: str
    value: Callable[[int, int], int]


_OPERATIONS: Final = (
    _Operation("{0} plus {1}", "{0} + {1}", lambda x, n: x + n),
    _Operation("{0} minus {1}", "{0} - {1}", lambda x, n: x - n),
    _Operation("{1} minus {0}", "{1} - {0}", lambda x, n: n - x),
    _Operation("{0} times {1}", "{0} * {1}", lambda x, n: x * n),
    _Operation("the larger of {0} and {1}", "max({0}, {1})", max),
    _Operation("the smaller of {0} and {1}", "min({0}, {1})", min),
    _Operation("the remainder of {0} divided by {1}", "{0} % {1}", lambda x, n: x % n),
    _Operation("the distance between {0} and {1}", "abs({0} - {1})", lambda x, n: abs(x - n)),
)


class _Parameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    operations: Annotated[int, Meta(ge=1, le=3)] = 1
    """Maximum number of chained operations."""
    max_number: Annotated[int, Meta(ge=2, le=10_000)] = 9
    tests: Annotated[int, Meta(ge=1, le=100)] = 3


def open_programs(request: SourceRequest) -> GeneratedSource:
    """Open the source `programs`. Raises `RecipeError` for unknown parameters."""
    parameters = parameters_of(request, _Parameters, source="programs")
    return GeneratedSource(
        lambda key: _drawn(parameters, key),
        domain=request.domain,
        split=request.split,
        seed=request.seed,
        prompts=request.prompts,
    )


def _drawn(parameters: _Parameters, key: int) -> Draft:
    noise = rng.generator(key, "programs")
    count = 1 + int(noise.integers(parameters.operations))
    steps = [_step(noise, parameters.max_number) for _ in range(count)]
    words, code = "x", "x"
    for place, (operation, number) in enumerate(steps):
        words = operation.words.format(f"({words})" if place else words, number)
        code = operation.code.format(f"({code})" if place else code, number)
    return Draft(
        messages=(Message("user", _REQUEST.format(words)),),
        ground_truth=_PROGRAM.format(code),
        metadata={"tests": [_test(steps, number) for number in _inputs(noise, steps, parameters)]},
        tags=(f"operations={count}",),
    )


def _step(noise: np.random.Generator, max_number: int) -> tuple[_Operation, int]:
    return _OPERATIONS[int(noise.integers(len(_OPERATIONS)))], 2 + int(noise.integers(max_number - 1))


def _inputs(noise: np.random.Generator, steps: list[tuple[_Operation, int]], parameters: _Parameters) -> list[int]:
    """Return test inputs below and above the numbers in the problem; the first input is a number that the function
    changes.
    """
    top = 3 * parameters.max_number
    inputs = [int(noise.integers(top)) for _ in range(parameters.tests)]
    tried = (*range(inputs[0], top), *range(inputs[0]))
    inputs[0] = next((x for x in tried if _result(steps, x) != x), inputs[0])
    return inputs


def _test(steps: list[tuple[_Operation, int]], number: int) -> Mapping[str, str]:
    return {"input": f"{number}\n", "output": f"{_result(steps, number)}\n"}


def _result(steps: list[tuple[_Operation, int]], number: int) -> int:
    for operation, other in steps:
        number = operation.value(number, other)
    return number
