"""Exact values: JSON that is decoded without changing a value, and the plain values that a problem may hold.

A value of a row reaches the verifier as it is in the file, or the row is refused:

| in the file | in the problem |
|---|---|
| text, boolean, null, list, object; integer of up to 64 bits; finite number | the same |
| integer of more than 64 bits; JSON number that a float would round; decimal | text of all its digits |
| date, time, timestamp | text, `2026-01-31 12:00:00` |
| binary, duration, NaN, infinity, invalid Unicode, a repeated key, more than `MOST_DEPTH` levels | refused |
"""

from __future__ import annotations

import datetime
import json
import math
import re
from decimal import Decimal, InvalidOperation
from typing import Any, Final

import numpy as np

from pipelinerl.errors import RecipeError

#: Maximum depth of nested lists and objects in a row.
MOST_DEPTH: Final = 100
#: Number of characters of a JSON number up to which a float holds all its digits, if it has no exponent.
_EXACT_CHARS: Final = 15
#: Maximum number of digits of a decimal that is written out as text.
_MOST_DIGITS: Final = 4_000
_INTEGERS: Final = range(-(2**63), 2**64)
#: Escape of a surrogate, half of a pair in JSON; a text is invalid if its other half is missing.
_SURROGATE: Final = re.compile(rb"\\u[dD][89a-fA-F]")


def decode(text: bytes) -> Any:
    """Decode a JSON value exactly; a number that a float would round becomes a `Decimal`.

    Raises `ValueError`, with one sentence, for invalid JSON, NaN, a repeated key, or a value nested too deeply.
    """
    try:
        value = DECODER.decode(text.decode())
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False, default=str).encode()
        return value
    except RecursionError:
        raise ValueError(f"its values are nested deeper than {MOST_DEPTH} levels") from None
    except UnicodeEncodeError:
        raise ValueError("a text has half of a surrogate pair, which is invalid Unicode") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r:.80} occurs twice in an object")
    return fields


def _number(text: str) -> float | Decimal:
    value = float(text)
    if len(text) <= _EXACT_CHARS and "e" not in text and "E" not in text:
        return value
    try:
        exact = Decimal(text)
    except InvalidOperation:  # an exponent beyond the range of decimals
        raise ValueError(f"the number {text:.80} is out of range") from None
    return value if math.isfinite(value) and Decimal(repr(value)) == exact else exact


def _refused(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


DECODER: Final = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_number, parse_constant=_refused)


def plain(value: Any, field: str, depth: int = 0) -> Any:
    """Convert a row's value as the module's table says. Raises `RecipeError`, which names `field`."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return valid_text(value, field)
    if isinstance(value, np.generic | np.ndarray):
        return plain(value.tolist(), field, depth)
    if isinstance(value, int):
        return int(value) if value in _INTEGERS else str(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise RecipeError(f"field {field!r} holds {value}, which is no number; remove it, or write a text")
        return float(value)
    if isinstance(value, Decimal):
        if not value.is_finite() or abs(value.adjusted()) > _MOST_DIGITS:
            raise RecipeError(f"field {field!r} holds the number {value!s:.80}, which is out of range")
        return format(value, "f")
    if isinstance(value, datetime.date | datetime.time):
        return str(value)
    if depth >= MOST_DEPTH:
        raise RecipeError(f"field {field!r} is nested deeper than {MOST_DEPTH} levels; write it as a text")
    if isinstance(value, list | tuple):
        return [plain(item, field, depth + 1) for item in value]
    if isinstance(value, dict):
        if wrong := [name for name in value if not isinstance(name, str)]:
            raise RecipeError(f"field {field!r} has the key {wrong[0]!r:.80}; keys must be texts")
        return {valid_text(name, field): plain(item, field, depth + 1) for name, item in value.items()}
    kind = "binary" if isinstance(value, bytes | bytearray | memoryview) else type(value).__name__
    raise RecipeError(f"field {field!r} holds a value of type {kind}; convert it to text or a number in the data")


def as_text(value: Any, field: str) -> str:
    """Convert a row's value to text; lists and objects become JSON. Raises `RecipeError`, which names `field`."""
    if type(value) is str:
        return valid_text(value, field)
    value = plain(value, field)
    if isinstance(value, list | dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value)


def valid_text(text: str, field: str) -> str:
    """Return `text`. Raises `RecipeError` if it has half of a surrogate pair, which UTF-8 cannot encode."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise RecipeError(f"field {field!r} has half of a surrogate pair, which is invalid Unicode") from None
    return text
