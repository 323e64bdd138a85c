r"""Equality of whole answers: choices, lists, tuples, intervals, sets, matrices, equations, and values with units.

A structure is split by its text and its parts are compared, so two values never equal one, and order and brackets count
where they do in mathematics. Texts and rational numbers are compared here, exactly; what remains is a pair of
expressions for `Expressions`, which may ask math-verify.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from fractions import Fraction
from typing import Final, NamedTuple

from pipelinerl.plugins.math_answer.notation import canonical, plain, split_top
from pipelinerl.plugins.math_answer.quantities import (
    Number,
    equal_quantities,
    equal_times,
    number,
    quantity,
    split_unit,
    time_of_day,
)

#: Decides whether two expressions are equal, the one of the ground truth first.
Expressions = Callable[[str, str], bool]

#: Largest number of parts of an answer; a longer one equals no ground truth but its own text.
_MOST_PARTS: Final = 64


class _Kind(StrEnum):
    VALUE = "value"
    LIST = "list"
    SET = "set"
    UNION = "union"
    TUPLE = "tuple"
    MATRIX = "matrix"


class _Shape(NamedTuple):
    kind: _Kind
    parts: tuple[str, ...]
    brackets: str = ""
    columns: int = 0


_COMMA: Final = re.compile(r"[,;]")
_AND: Final = re.compile(r"[,;]?\s?\\text\{\s?,?\s?(?:and|or)\s?\}|[,;]?(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])|[,;]")
_OR: Final = re.compile(r"[,;]?\s?\\text\{\s?(?:or)\s?\}|[,;]?(?<![A-Za-z\\])or(?![A-Za-z])|[,;]|\\lor|\\cup")
_CUP: Final = re.compile(r"\\cup")
_ROW: Final = re.compile(r"\\\\")
_EQUALS: Final = re.compile(r"(?<![<>!:])=|\\approx|\\equiv(?!.*\\pmod)")
_RELATION: Final = re.compile(r"<|>|\\le(?![a-z])|\\ge(?![a-z])|\\ne(?![a-z])")
_ORDER: Final = re.compile(r"(<|>|\\le(?![a-z])|\\ge(?![a-z]))")
_MATRIX: Final = re.compile(r"\\begin\{([pbvBV]?)matrix\}(.*)\\end\{\1matrix\}", re.DOTALL)
_PLUS_MINUS: Final = re.compile(r"\\pm(?![a-z])|\\mp(?![a-z])")
_MEMBER: Final = re.compile(r"[A-Za-z](?:_\w)?\\in ?(?=\\?[\[({]|\\mathbb|\\text)")
_REALS: Final = frozenset({r"\mathbb{R}", r"\mathbf{R}", "all real numbers", "all reals"})
#: Text that may stand left of `=` without being part of the value: a variable, f(x), AB, (x,y), m+n, |z|, Area.
_NAME: Final = re.compile(
    r"(?:\\(?:angle|text|overline|mathbb|triangle|alpha|beta|gamma|theta|lambda|mu|phi|omega|det|operatorname|vec|max|min)"
    r"|[A-Za-z'|]|_\w|_\{[^{}]*\}|\{[A-Za-z ]+\}|\((?:\\?[A-Za-z0-9_']+[,+-]?)+\)| |[-+](?=[A-Za-z\\]))+"
)
_CHOICE: Final = re.compile(r"\(([A-J])\)(.*)|([A-J])[.):](?! ?\d*/)(.*)|([A-J])()", re.DOTALL)
_FURTHER_CHOICE: Final = re.compile(r"(?<![A-Za-z\\])(?:[A-J](?![A-Za-z(])|and(?![A-Za-z])|or(?![A-Za-z]))")
_FUNCTIONS: Final = frozenset({
    "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan",
    "sqrt", "gcd", "lcm", "min", "max",
})  # fmt: skip
_WORDS: Final = frozenset({
    "no", "not", "or", "and", "is", "are", "of", "to", "in", "if", "the", "all", "any", "odd", "for", "at", "by",
    "yes", "dne", "nor", "but", "one", "two", "six", "ten", "per", "mod",
})  # fmt: skip
_MISREAD: Final = re.compile(r"\d_|(?:^|[^_\d])\d+ \d|[?$]|\\\\|\\[lcd]?dots|\.\.")
_RUN: Final = re.compile(r"[A-Za-z]+")


def equal(gold: str, given: str, expressions: Expressions) -> bool:
    """Return whether an answer equals a ground truth, both as `final_answer` and `reference_answer` return them.

    Whatever `expressions` raises passes through.
    """
    return _equal(canonical(gold), canonical(given), expressions)


def _equal(gold: str, given: str, expressions: Expressions) -> bool:
    left, right = plain(gold), plain(given)
    if not right:
        return False
    if _text(left) == _text(right):
        return not right.endswith("?")
    wanted, chosen = _choice(left), _choice(right)
    if wanted and not (chosen is None and (wanted[5] or not _rest(wanted))):
        value = _rest(wanted)
        if chosen is None:
            return bool(value) and _equal(canonical(value), given, expressions)
        if (wanted[1] or wanted[3] or wanted[5]) != (chosen[1] or chosen[3] or chosen[5]):
            return False
        return not (value and _rest(chosen)) or _equal(canonical(value), canonical(_rest(chosen)), expressions)
    if chosen and _rest(chosen) and not wanted:
        return _equal(gold, canonical(_rest(chosen)), expressions)
    return _equal_shapes(_shape(gold), _shape(given), expressions)


def _text(text: str) -> str:
    words = re.sub(r"^(?:an?|the) ", "", text, flags=re.IGNORECASE)
    return words.casefold() if len(words) > 1 and re.fullmatch(r"[A-Za-z ,.'-]+", words) and has_words(words) else text


def _choice(text: str) -> re.Match[str] | None:
    """Match a choice with what follows it, unless that is a further choice."""
    match = _CHOICE.fullmatch(re.sub(r"^(?:option|choice) ?(?=\(?[A-J]\b)", "", text, flags=re.IGNORECASE))
    return None if match is None or _FURTHER_CHOICE.search(_rest(match)) else match


def _rest(choice: re.Match[str]) -> str:
    return (choice[2] or choice[4] or "").strip()


# --- structures -------------------------------------------------------------------------------------------------------


def _shape(text: str) -> _Shape:
    value = _Shape(_Kind.VALUE, (text,))
    if quantity(text) is not None or time_of_day(plain(text)) is not None:
        return value
    name, stated = _named(text)
    member = _MEMBER.match(text)
    if name.startswith("(") or (name and _PLUS_MINUS.search(stated)):
        text = stated
    elif member is not None:
        text = text[member.end() :].strip()
    if plain(text) in _REALS:
        return _Shape(_Kind.TUPLE, (r"-\infty", r"\infty"), "()")
    if matrix := _MATRIX.fullmatch(text):
        rows = [split_top(row, re.compile("&")) for row in split_top(matrix[2], _ROW) if row]
        cells = tuple(cell for row in rows for cell in row)
        return _Shape(_Kind.MATRIX, cells, columns=len(rows[0]) if len({len(row) for row in rows}) == 1 else -1)
    parts = _alternatives(text)
    if len(parts) > 1:
        ranges = all(_shape(part).kind is _Kind.TUPLE and _ORDER.search(part) for part in parts)
        return _Shape(_Kind.UNION if ranges or _CUP.search(text) else _Kind.LIST, tuple(parts[: _MOST_PARTS + 1]))
    return _bracketed(text) or _interval(text) or value


def _alternatives(text: str) -> list[str]:
    """Split a list, a union, or values with one ±, into their members; return others as they are."""
    parts = split_top(text, _OR if _RELATION.search(text) or _CUP.search(text) else _AND)
    parts = [part for part in parts if part]
    if len(parts) > 1:
        name, _ = _named(parts[0])
        if name and not _named(parts[1])[0]:
            parts = [_named(parts[0])[1], *parts[1:]]
        return [one for part in parts for one in ([part] if len(parts) > _MOST_PARTS else _both_signs(part))]
    return _both_signs(text)


def _both_signs(text: str) -> list[str]:
    _, stated = _named(text)
    signs = _PLUS_MINUS.findall(stated)
    if len(signs) != 1:
        return [text]
    return [_PLUS_MINUS.sub(sign, stated).strip().removeprefix("+").strip() for sign in "+-"]


def _bracketed(text: str) -> _Shape | None:
    if text.startswith(r"\{") and text.endswith(r"\}"):
        parts = [one for part in split_top(text[2:-2], _COMMA) if part for one in _both_signs(part)]
        return None if re.search(r"\\mid|\||:", text) else _Shape(_Kind.SET, tuple(parts))
    if text[:1] in ("(", "[") and text[-1:] in (")", "]"):
        parts = split_top(text[1:-1], _COMMA)
        if len(parts) > 1 and all(parts):
            return _Shape(_Kind.TUPLE, tuple(parts), text[0] + text[-1])
    return None


def _interval(text: str) -> _Shape | None:
    """Return an inequality about one variable as an interval, None if it is something else."""
    tokens = [part.strip() for part in _ORDER.split(text)]
    terms, signs = tokens[::2], tokens[1::2]
    if not signs or len(signs) > 2 or not all(terms):
        return None
    if all(sign in (">", r"\ge") for sign in signs):
        terms, signs = terms[::-1], [{">": "<", r"\ge": r"\le"}[sign] for sign in signs[::-1]]
    if not all(sign in ("<", r"\le") for sign in signs):
        return None
    if len(terms) == 2:
        if re.fullmatch(r"[A-Za-z]", terms[0]):
            terms, signs = [r"-\infty", *terms], ["<", *signs]
        else:
            terms, signs = [*terms, r"\infty"], [*signs, "<"]
    if not re.fullmatch(r"[A-Za-z]", terms[1]) or terms[1] in terms[0] + terms[2]:
        return None
    opening, closing = ("(" if signs[0] == "<" else "["), (")" if signs[1] == "<" else "]")
    return _Shape(_Kind.TUPLE, (terms[0], terms[2]), opening + closing)


def _equal_shapes(gold: _Shape, given: _Shape, expressions: Expressions) -> bool:
    if max(len(gold.parts), len(given.parts)) > _MOST_PARTS:
        return False
    kinds = {gold.kind, given.kind}
    if kinds == {_Kind.VALUE}:
        return _equal_values(gold.parts[0], given.parts[0], expressions)
    if len(gold.parts) != len(given.parts):
        return False
    in_order = zip(gold.parts, given.parts, strict=True)
    if kinds <= {_Kind.TUPLE, _Kind.MATRIX}:
        if gold.kind is given.kind:
            same_frame = (gold.brackets, gold.columns) == (given.brackets, given.columns)
        else:
            matrix, other = (gold, given) if gold.kind is _Kind.MATRIX else (given, gold)
            same_frame = other.brackets == "()" and matrix.columns in (1, len(matrix.parts))
        return same_frame and all(_equal(one, other, expressions) for one, other in in_order)
    if kinds == {_Kind.TUPLE, _Kind.LIST}:
        listed, framed = (gold, given) if gold.kind is _Kind.LIST else (given, gold)
        names = "".join(_named(part)[0] for part in listed.parts)
        if framed.brackets != "()" or not (len(listed.parts) > 2 or names in ("xy", "ab", "mn", "pq")):
            return False
        return all(_equal(one, other, expressions) for one, other in in_order)
    if kinds <= {_Kind.LIST, _Kind.SET, _Kind.UNION} or (_Kind.VALUE in kinds and _Kind.SET in kinds):
        return _equal_unordered(gold.parts, given.parts, expressions)
    return False


def _equal_unordered(gold: Sequence[str], given: Sequence[str], expressions: Expressions) -> bool:
    """Return whether each part of one has its own equal in the other; cheap comparisons come first."""
    left = list(given)
    for part in gold:
        place = next((place for place, other in enumerate(left) if plain(part) == plain(other)), None)
        if place is None:
            place = next((place for place, other in enumerate(left) if _equal(part, other, expressions)), None)
        if place is None:
            return False
        del left[place]
    return True


# --- values -----------------------------------------------------------------------------------------------------------


def _named(text: str) -> tuple[str, str]:
    """Split `name = value` into the two; ("", text) if the text has another form."""
    sides = split_top(text, _EQUALS)
    if len(sides) != 2 or not _NAME.fullmatch(sides[0]) or _RELATION.search(text):
        return "", text
    return plain(sides[0]), sides[1]


def _equal_values(gold: str, given: str, expressions: Expressions) -> bool:
    if _RELATION.search(gold) or _RELATION.search(given):
        both = bool(_RELATION.search(gold) and _RELATION.search(given))
        return both and _equal_expressions(gold, given, expressions)
    (name, wanted), sides = _named(gold), [side for side in split_top(given, _EQUALS) if side]
    if len(sides) < 2:
        return bool(sides) and _equal_scalars(wanted, sides[0], expressions)
    names = [plain(side) for side in sides if _NAME.fullmatch(side)]
    if "=" in gold and names[:1] != [name]:
        return _equal_expressions(gold, given, expressions)
    values = [side for place, side in enumerate(sides) if not (_NAME.fullmatch(side) and place in (0, len(sides) - 1))]
    if len(values) == 0 and len(sides) == 2:  # x = y: the right side is the value
        values = sides[1:]
    return bool(values) and all(_equal_scalars(wanted, value, expressions) for value in values)


def _equal_scalars(gold: str, given: str, expressions: Expressions) -> bool:
    left, right = plain(gold), plain(given)
    if _text(left) == _text(right):
        return bool(right)
    times = time_of_day(left), time_of_day(right)
    if times[0] is not None and (times[1] is not None or ":" in left):
        return times[1] is not None and equal_times(times[0], times[1])
    wanted, stated = quantity(gold), quantity(given)
    if wanted is not None and stated is not None:
        return equal_quantities(wanted, stated)
    if ratio := _equal_ratios(left, right):
        return ratio
    bare = _without_units(gold, given)
    return bare is not None and _equal_expressions(*bare, expressions)


def _without_units(gold: str, given: str) -> tuple[str, str] | None:
    """Return two expressions in one unit, None if their units differ or one is a percentage."""
    (left, unit), (right, other) = split_unit(gold), split_unit(given)
    if unit and other and unit.dimensions and other.dimensions:
        if unit.dimensions != other.dimensions:
            return None
        return (left, right) if unit == other else (_times(left, unit.size), _times(right, other.size))
    names = (unit.name if unit else "", other.name if other else "")
    if "percent" in names:
        return None
    if names == ("angle", "") and r"\pi" in right:
        left = rf"({left})\cdot\frac{{\pi}}{{180}}"
    elif names == ("", "angle") and r"\pi" in left:
        right = rf"({right})\cdot\frac{{\pi}}{{180}}"
    return left, right


def _times(text: str, size: Fraction) -> str:
    return rf"({text})\cdot\frac{{{size.numerator}}}{{{size.denominator}}}"


def _equal_ratios(gold: str, given: str) -> bool:
    parts = [re.split(r" ?: ?| to ", text) for text in (gold, given)]
    if sorted(map(len, parts)) not in ([1, 2], [2, 2]):
        return False
    numbers: list[list[Number | None]] = [[number(part) for part in each] for each in parts]
    values = []
    for each in numbers:
        if any(one is None for one in each) or (len(each) == 2 and each[1] and not each[1].value):
            return False
        first, *rest = (one.value for one in each if one is not None)
        values.append(first / rest[0] if rest else first)
    return values[0] == values[1]


def _equal_expressions(gold: str, given: str, expressions: Expressions) -> bool:
    """Compare two expressions, unless one has what a parser of mathematics would misread.

    It reads words and numbers in a row as products, and drops the base of a number.
    """
    gold, given = plain(gold), plain(given)
    if has_words(gold) or has_words(given) or _MISREAD.search(gold + given):
        return False
    return expressions(gold, given)


def has_words(text: str) -> bool:
    """Return whether a text contains a word of a language."""
    for run in _RUN.findall(re.sub(r"\\[A-Za-z]+|_\{[^{}]*\}", " ", text)):
        if run not in _FUNCTIONS and (len(run) > 3 or run.lower() in _WORDS):
            return True
    return False
