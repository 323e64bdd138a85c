"""The boundary for values that come from user code: the only place where such a value becomes a number or a text.

`reward_of` accepts a bool, a number, a NumPy scalar, and an array or tensor of one element, if it is finite and within
±`MOST_REWARD`. Text is never a number here. `plain_verdict` checks every field of a user's `Verdict`. Whatever the
methods of a value do, these functions raise only `NotAReward` and `NotAVerdict`, whose messages describe the value.
Results hold only plain Python objects of bounded size.
"""

from __future__ import annotations

import inspect
import math
import reprlib
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Final

from pipelinerl.types import MOST_SHOWN, Outcome, RewardPart, Verdict

#: Largest accepted reward; a larger number is a mistake that would dominate its batch.
MOST_REWARD: Final = 1e6
#: Values that user code may return to judge an answer.
EXPECTED: Final = f"a finite number within ±{MOST_REWARD:g}, a bool, a Verdict or None"
#: Largest accepted number of parts of a `Verdict`.
_MOST_PARTS: Final = 64
#: Integers up to this length have a readable `repr`; Python refuses to write those of more than 4300 digits.
_MOST_BITS: Final = 256
_MOST_CHARACTERS: Final = 80


class NotAReward(ValueError):
    """A value is no number, is not finite, or is above `MOST_REWARD`; the message describes it."""


class NotAVerdict(ValueError):
    """A field of a user's `Verdict` cannot be used; the message names and describes it."""


def reward_of(value: object, *, most: float = MOST_REWARD) -> float:
    """Return a value of user code as a float within ±`most`. Raises `NotAReward`."""
    try:
        plain = value if isinstance(value, Real) else _item(value)
        reward = float(plain) if isinstance(plain, Real) else math.nan
    except BaseException:  # methods of a user's object may raise anything, and large integers overflow
        reward = math.nan
    if not abs(reward) <= most:
        raise NotAReward(described(value))
    return reward


def plain_verdict(verdict: Verdict, *, most: float = MOST_REWARD) -> Verdict:
    """Return a `Verdict` with plain and bounded fields. Raises `NotAVerdict` if one of them cannot be used.

    A `reason` may be any object, and None is empty. The reward of a verdict that is no judgement becomes 0.
    """
    fields: dict[str, Any] = {}
    for name, plain in _FIELDS.items():
        value: object = None
        try:
            value = getattr(verdict, name)
            unjudged = name == "reward" and not fields["outcome"].is_judgement
            fields[name] = 0.0 if unjudged else plain(value, most)
        except BaseException:  # a user's object may raise anything
            expected = f"a finite number within ±{most:g}" if name == "reward" else _FIELD_EXPECTED[name]
            raise NotAVerdict(f"{name} of a Verdict must be {expected}, it is {described(value)}") from None
    return Verdict(**fields)


def shown(text: str) -> str:
    """Cut a text for a verdict to `MOST_SHOWN` characters, and replace lone surrogates, which cannot be encoded."""
    return text[:MOST_SHOWN].encode("utf-8", "replace").decode()


def described(value: object) -> str:
    """Return the type of a value and a short `repr`; never raises."""
    try:
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that it was never awaited
        kind = type(value).__name__
    except BaseException:  # the type of a user's object may raise anything
        kind = "an object"
    try:
        if isinstance(value, int) and value.bit_length() > _MOST_BITS:
            return f"{kind} of {value.bit_length()} bits"
        text = _SHORT.repr(value)[:_MOST_CHARACTERS]
        return text if value is None or type(value) in (bool, int, float) else f"{kind} {text}"
    except BaseException:  # `__repr__` of a user's object may raise anything
        return f"{kind} whose repr fails"


def _short() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxlevel = 3
    short.maxstring = short.maxother = short.maxlong = _MOST_CHARACTERS
    return short


#: Limits the depth and the number of elements, so that a huge container costs no more than a small one.
_SHORT: Final = _short()


def _item(value: Any) -> Any:
    return value.item() if callable(getattr(value, "item", None)) else None


def _any_text(value: object) -> str:
    return shown(str.__str__(value)) if isinstance(value, str) else described(value)


def _reason_of(value: object) -> str:
    return "" if value is None else _any_text(value)


def _text_of(value: object) -> str:
    if value is None or isinstance(value, str):
        return _reason_of(value)
    plain = value if isinstance(value, Real) else _item(value)
    if not isinstance(plain, bool | int | float):
        raise TypeError("no text")
    return shown(str(plain))


def _parts_of(value: Any, most: float) -> tuple[RewardPart, ...]:
    several = tuple(value.items()) if isinstance(value, Mapping) else tuple(value or ())
    if len(several) > _MOST_PARTS:
        raise ValueError("too many parts")
    return tuple(RewardPart(_text_of(name), reward_of(reward, most=most)) for name, reward in several)


#: For each field of a `Verdict`, in the order of checking: the function of its value and the largest reward.
_FIELDS: Final[Mapping[str, Callable[[Any, float], Any]]] = {
    "outcome": lambda value, most: Outcome(value),
    "reward": lambda value, most: reward_of(value, most=most),
    "answer": lambda value, most: _text_of(value),
    "parts": _parts_of,
    "reason": lambda value, most: _reason_of(value),
}
_FIELD_EXPECTED: Final = {
    "outcome": f"one of {', '.join(Outcome)}",
    "answer": "a text",
    "parts": f"at most {_MOST_PARTS} pairs of a name and a number",
    "reason": "a text",
}
