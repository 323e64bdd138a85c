"""The source `programs`: requests for a Python program that computes a function of a number x.

Functions are like "x times 7", or with two operations "(the larger of x and 7) minus 3". Each problem has tests for the
verifier `oubliette`, and a ground truth that passes them. The first test's expected output differs from its input, if
the function allows it, so that a program that prints its input fails.

    parameters = { operations = 1, max_number = 9, tests = 3 }
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

from msgspec import Meta, Struct

from pipelinerl import rng
from pipelinerl.data.generated import GeneratedSource, parameters_of
from pipelinerl.data.source import Draft, SourceRequest
from pipelinerl.types import Message

_REQUEST: Final = "Write a program that reads a number x and prints {}."
_PROGRAM: Final = "```\nx = int(input())\nprint({})\n```"


#: An operation on x and a constant n: its words, its code (`{0}` is x and `{1}` is n), and its function.
_Operation = tuple[str, str, Callable[[int, int], int]]
_OPERATIONS: Final[tuple[_Operation, ...]] = (
    ("{0} plus {1}", "{0} + {1}", lambda x, n: x + n),
    ("{0} minus {1}", "{0} - {1}", lambda x, n: x - n),
    ("{1} minus {0}", "{1} - {0}", lambda x, n: n - x),
    ("{0} times {1}", "{0} * {1}", lambda x, n: x * n),
    ("the larger of {0} and {1}", "max({0}, {1})", max),
    ("the smaller of {0} and {1}", "min({0}, {1})", min),
    ("the remainder of {0} divided by {1}", "{0} % {1}", lambda x, n: x % n),
    ("the distance between {0} and {1}", "abs({0} - {1})", lambda x, n: abs(x - n)),
)


class _Parameters(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    operations: Annotated[int, Meta(ge=1, le=3)] = 1
    """Maximum number of chained operations."""
    max_number: Annotated[int, Meta(ge=2, le=10_000)] = 9
    tests: Annotated[int, Meta(ge=1, le=100)] = 3


def open_programs(request: SourceRequest) -> GeneratedSource:
    """Open the source `programs`. Raises `RecipeError` for invalid parameters."""
    parameters = parameters_of(request, _Parameters, source="programs")
    return GeneratedSource(lambda key: _drawn(parameters, key), request)


def _drawn(parameters: _Parameters, key: int) -> Draft:
    noise = rng.generator(key, "programs")
    count = 1 + int(noise.integers(parameters.operations))
    steps = [
        (_OPERATIONS[int(noise.integers(len(_OPERATIONS)))], 2 + int(noise.integers(parameters.max_number - 1)))
        for _ in range(count)
    ]
    words, code = "x", "x"
    for place, ((in_words, in_code, _), number) in enumerate(steps):
        words = in_words.format(f"({words})" if place else words, number)
        code = in_code.format(f"({code})" if place else code, number)

    def result(x: int) -> int:
        for (_, _, value), number in steps:
            x = value(x, number)
        return x

    top = 3 * parameters.max_number
    inputs = [int(noise.integers(top)) for _ in range(parameters.tests)]
    inputs[0] = next((x for x in (*range(inputs[0], top), *range(inputs[0])) if result(x) != x), inputs[0])
    return Draft(
        messages=(Message("user", _REQUEST.format(words)),),
        ground_truth=_PROGRAM.format(code),
        metadata={"tests": [{"input": f"{x}\n", "output": f"{result(x)}\n"} for x in inputs]},
        tags=(f"operations={count}",),
    )
