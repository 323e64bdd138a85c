"""`VALUES`: what user code may return or raise by mistake, for the fuzzers of every boundary; and `case`, one of them.

Each entry is a function that makes the value. `REWARDS` are the entries that are rewards, with their numbers; every
other entry must mask its answer.
"""

import asyncio
import random
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, Final, final

import numpy as np


@final
class Raises:
    """An object all of whose methods raise what it was made with."""

    def __init__(self, kind):
        object.__setattr__(self, "_kind", kind)

    def _raise(self, *_):
        raise object.__getattribute__(self, "_kind")("hostile")

    __repr__ = __str__ = __eq__ = __hash__ = __float__ = __bool__ = __len__ = __iter__ = __int__ = _raise  # type: ignore[assignment]
    __getattr__ = __index__ = __format__ = __lt__ = __getitem__ = __reduce__ = _raise  # type: ignore[assignment]


class OwnError(BaseException):
    """An exception that is no `Exception`."""


class Unreadable(Exception):
    """An exception whose message cannot be read."""

    def __str__(self):
        raise OwnError

    __repr__ = __str__


class FloatThatRaises(float):
    def __float__(self):
        raise OwnError


class TextThatRaises(str):
    def __getitem__(self, _):
        raise OwnError

    encode = __len__ = __iter__ = __getitem__  # type: ignore[assignment]


class LongRepr:
    def __repr__(self):
        return "x" * 10**6


def _generator():
    yield 1


async def _coroutine():
    return 1.0


def _nested():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    return deep


def _own_part():
    own: list[Any] = []
    own.append(own)
    return own


VALUES: Final[dict[str, Callable[[], Any]]] = {
    "float32": lambda: np.float32(0.5),
    "float64": lambda: np.float64(0.5),
    "int64": lambda: np.int64(1),
    "bool_": lambda: np.bool_(True),
    "array0": lambda: np.array(0.5),
    "array1": lambda: np.array([0.5]),
    "true": lambda: True,
    "int": lambda: 1,
    "fraction": lambda: Fraction(1, 2),
    "none": lambda: None,
    "nan": lambda: float("nan"),
    "inf": lambda: float("-inf"),
    "nan32": lambda: np.float32("nan"),
    "large": lambda: 10**400,
    "unprintable": lambda: 10**5000,
    "too much": lambda: 1.1e6,
    "complex": lambda: 1j,
    "decimal": lambda: Decimal("0.5"),
    "timedelta": lambda: np.timedelta64(1, "s"),
    "array": lambda: np.ones(3),
    "empty array": lambda: np.ones(0),
    "objects": lambda: np.array([object()]),
    "text": lambda: "1",
    "surrogate": lambda: "\ud800",
    "long text": lambda: "x" * 10**6,
    "text that raises": lambda: TextThatRaises("1"),
    "float that raises": lambda: FloatThatRaises(1.0),
    "bytes": lambda: b"1\xff",
    "list": lambda: [1.0],
    "set": lambda: {1.0},
    "dict": lambda: {"reward": 1.0},
    "nested": _nested,
    "own part": _own_part,
    "generator": _generator,
    "coroutine": _coroutine,
    "class": lambda: int,
    "function": lambda: _generator,
    "long repr": LongRepr,
    "exception": lambda: ValueError("x"),
    "raises": lambda: Raises(ValueError),
    "raises exit": lambda: Raises(SystemExit),
    "raises own": lambda: Raises(OwnError),
    "raises generator exit": lambda: Raises(GeneratorExit),
    "raises recursion": lambda: Raises(RecursionError),
}
REWARDS: Final = {
    "float32": 0.5, "float64": 0.5, "int64": 1.0, "bool_": 1.0, "array0": 0.5, "array1": 0.5, "true": 1.0, "int": 1.0,
    "fraction": 0.5,
}  # fmt: skip
ERRORS: Final[tuple[type[BaseException], ...]] = (
    ValueError, MemoryError, RecursionError, StopIteration, OSError, ExceptionGroup, SyntaxError, KeyError, Unreadable,
    OwnError, SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError, TimeoutError, StopAsyncIteration,
)  # fmt: skip
#: Ways in which a value comes: by itself, in a field of a `Verdict`, in a list, or as the message of an exception.
SHAPES: Final = ("value", "outcome", "reward", "reason", "answer", "parts", "part", "list", "raise", "group")


def case(number):
    """Return the shape, the name of the value, and the number of the exception's type for a case of a fuzzer."""
    chosen = random.Random(number)
    return chosen.choice(SHAPES), chosen.choice(tuple(VALUES)), chosen.randrange(len(ERRORS))


def happen(number):
    """Return or raise what case `number` says; for use in the code of a user."""
    from pipelinerl.types import Outcome, Verdict

    shape, name, error = case(number)
    value = VALUES[name]()
    if shape == "raise":
        kind = ERRORS[error]
        raise ExceptionGroup("several", [ValueError(value)]) if kind is ExceptionGroup else kind(value)
    if shape in ("value", "list", "group"):
        return value if shape == "value" else [value]
    fields: dict[str, Any] = {"outcome": Outcome.CORRECT, "reward": 1.0}
    fields["parts" if shape == "part" else shape] = [("p", value)] if shape == "part" else value
    return Verdict(**fields)


def expected(number):
    """Return the reward of case `number` if it must have one, else None."""
    shape, name, _ = case(number)
    if shape in ("value", "reward"):
        return REWARDS.get(name)
    return 1.0 if shape == "reason" else None


def must_be_masked(number):
    """Return whether case `number` must not have a reward."""
    shape, name, _ = case(number)
    return shape in ("raise", "list", "outcome", "group") or (
        shape in ("value", "reward", "part") and name not in REWARDS
    )
