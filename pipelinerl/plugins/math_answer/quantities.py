r"""Quantities in answers, read exactly: rational numbers in all notations, units, percentages and times of day.

A decimal stands for another number only if it is that number, correctly rounded, with six significant digits or more of
which four or more are decimals. A unit that only one of two answers states is ignored; two stated units must agree.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Final, NamedTuple

from pipelinerl.plugins.math_answer.notation import plain

#: Largest exponent of ten in scientific notation.
_MOST_EXPONENT: Final = 10_000
_LEAST_DIGITS: Final = 6
_LEAST_DECIMALS: Final = 4

_DIGITS = r"(?:\d{1,3}(?:[, ]\d{3})+(?:\.\d+)?|\d+(?:\.\d*)?|\.\d+)"
_SIGNED = rf"[-+]? ?{_DIGITS}"
_DECIMAL: Final = re.compile(rf"({_SIGNED})")
_SCIENTIFIC: Final = re.compile(
    rf"({_SIGNED}) ?(?:[eE]([-+]?\d+)|(?:\\times|\\cdot|x) ?10\^ ?(?:\{{ ?([-+]?\d+) ?\}}|([-+]?\d+)))"
)
_POWER_OF_TEN: Final = re.compile(r"([-+]?)10\^(?:\{([-+]?\d+)\}|(-\d+|\d))")
_QUOTIENT: Final = re.compile(
    rf"([-+]?) ?(?:({_SIGNED}) ?/ ?({_SIGNED})|\\frac\{{ ?({_SIGNED}) ?\}}\{{ ?({_SIGNED}) ?\}})"
)
_MIXED: Final = re.compile(r"([-+]?) ?(\d+)(?: (?:and )?(\d+) ?/ ?(\d+)| ?\\frac\{(\d+)\}\{(\d+)\})")
_REPEATING: Final = re.compile(r"([-+]?)(\d*)\.(\d*)\\(?:overline|bar|dot)\{?(\d+)\}?")
_WORDS: Final = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
)  # fmt: skip


class Number(NamedTuple):
    """An exact value; `ulp` is the last digit's weight if the number may be a rounded one."""

    value: Fraction
    ulp: Fraction | None = None

    def equals(self, other: Number) -> bool:
        """Return whether the numbers are equal, or one is the other rounded."""
        if self.value == other.value:
            return True
        if (self.ulp is None) == (other.ulp is None):
            return False
        rounded, exact = (self, other) if self.ulp is not None else (other, self)
        rest = exact.value.denominator
        for prime in (2, 5):
            while rest % prime == 0:
                rest //= prime
        return rest != 1 and rounded.may_be(exact.value)  # a decimal that terminates is written in full

    def may_be(self, value: Fraction) -> bool:
        """Return whether this number is `value` correctly rounded."""
        return self.ulp is not None and 2 * abs(self.value - value) <= self.ulp


def number(text: str) -> Number | None:
    """Return the rational number that a canonical text writes, None if it writes none, or one of too many digits."""
    if re.search(r"\d, \d", text):
        return None
    text = plain(text)
    if text[:1] == "(" and text[-1:] == ")" and "," not in text and text.count("(") == 1:
        text = text[1:-1].strip()
    if text.lower() in _WORDS:
        return Number(Fraction(_WORDS.index(text.lower())))
    try:
        if match := _DECIMAL.fullmatch(text):
            return _rounded(match[1], 0)
        if match := _SCIENTIFIC.fullmatch(text):
            return _rounded(match[1], int(match[2] or match[3] or match[4]))
        if match := _POWER_OF_TEN.fullmatch(text):
            return _rounded(f"{match[1]}1", int(match[2] or match[3]))
        return _quotient(text)
    except (ZeroDivisionError, ValueError):
        return None


def _rounded(digits: str, exponent: int) -> Number | None:
    if abs(exponent) > _MOST_EXPONENT:
        return None
    digits = re.sub(r"[, ]", "", digits)
    decimals = len(digits.partition(".")[2])
    scale = Fraction(10) ** exponent
    significant = len(digits.lstrip("+-0.").replace(".", ""))
    rounded = significant >= _LEAST_DIGITS and decimals >= _LEAST_DECIMALS
    return Number(Fraction(digits) * scale, scale / 10**decimals if rounded else None)


def _quotient(text: str) -> Number | None:
    if match := _MIXED.fullmatch(text):
        whole, above, below = int(match[2]), int(match[3] or match[5]), int(match[4] or match[6])
        if above >= below:
            return None
        value = whole + Fraction(above, below)
    elif match := _QUOTIENT.fullmatch(text):
        value = _fraction(match[2] or match[4]) / _fraction(match[3] or match[5])
    elif match := _REPEATING.fullmatch(text):
        begin, period = match[3], match[4]
        value = Fraction(f"{match[2] or 0}.{begin or 0}") + Fraction(
            int(period), 10 ** len(begin) * (10 ** len(period) - 1)
        )
    else:
        return None
    return Number(-value if match[1] == "-" else value)


def _fraction(digits: str) -> Fraction:
    return Fraction(re.sub(r"[, ]", "", digits))


# --- units ------------------------------------------------------------------------------------------------------------

#: Units by dimension, each as its names and its size.
_SIZES: Final[Mapping[str, Mapping[str, Fraction | int]]] = {
    "length": {
        "m meter metre": 1, "mm millimeter millimetre": Fraction(1, 1000), "cm centimeter centimetre": Fraction(1, 100),
        "dm decimeter decimetre": Fraction(1, 10), "km kilometer kilometre": 1000, "in inch inche": Fraction("0.0254"),
        "ft foot feet": Fraction("0.3048"), "yd yard": Fraction("0.9144"), "mi mile": Fraction("1609.344"),
    },
    "time": {
        "s sec second": 1, "min minute": 60, "h hr hour": 3600, "day": 86_400, "week": 604_800,
        "ms millisecond": Fraction(1, 1000),
    },
    "month": {"month": 1, "yr year": 12, "decade": 120, "century centurie": 1200},
    "mass": {
        "kg kilogram": 1, "g gram": Fraction(1, 1000), "mg milligram": Fraction(1, 10**6),
        "lb pound": Fraction("0.45359237"), "oz ounce": Fraction("0.45359237") / 16, "t tonne": 1000,
    },
    "money": {"$ dollar usd buck": 1, "¢ cent": Fraction(1, 100)},
    "euro": {"€ euro eur": 1},
    "volume": {
        "l liter litre": 1, "ml milliliter millilitre": Fraction(1, 1000), "gal gallon": Fraction("3.785411784"),
    },
    "angle": {r"^\circ degree deg": 1},
    "percent": {"% percent pct percentage": 1},
    "": {"unit": 1},
}  # fmt: skip
_UNITS: Final = {
    name: (dimension, Fraction(size))
    for dimension, sizes in _SIZES.items()
    for names, size in sizes.items()
    for name in names.split()
}
_SYMBOLS: Final = {r"^\circ C": r"celsius", r"^\circ F": "fahrenheit", "mph": "mile/hour", "kph": "km/hour"}
#: Words after a number that change what it says, and are no unit.
_NO_UNIT: Final = frozenset({
    "hundred", "thousand", "million", "billion", "trillion",
    "a", "above", "an", "and", "are", "as", "at", "be", "below", "between", "by", "choose", "eighth", "eighths",
    "factorial", "fifth", "fifths", "for", "fourth", "fourths", "from", "half", "halves", "hundredth",
    "hundredths", "if", "in", "is", "it", "least", "less", "minus", "mod", "modulo", "more", "most", "negative",
    "ninth", "ninths", "no", "not", "of", "off", "on", "or", "out", "over", "plus", "quarter", "quarters",
    "right", "seventh", "sevenths", "sixth", "sixths", "tenth", "tenths", "than", "that", "the", "third",
    "thirds", "thousandth", "thousandths", "to", "under", "was", "where", "which", "with", "wrong", "zero",
})  # fmt: skip
_SCALES: Final = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_SCALE: Final = re.compile(
    rf"(?P<digits>{_DIGITS}) ?(?P<text>\\text\{{ ?)?(?P<scale>{'|'.join(_SCALES)})(?![A-Za-z])(?P<rest>.*)"
)
#: Largest number of characters, and of words, of a unit.
_MOST_UNIT_CHARS: Final = 100
_MOST_UNIT_WORDS: Final = 8
_TRAILING: Final = re.compile(
    r"(?P<body>.*?[\d)}!.|]|.*\\(?:pi|infty))"
    r"(?P<unit>(?:(?<=[)}\d])|(?= )|(?=\\text)|(?=[%¢^]))(?:\\text\{[^{}]*\}|\^[23]|\^\\circ ?|[A-Za-z %¢/.])+)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit: its size, and the exponents of its dimensions; no dimension for "units"."""

    size: Fraction
    dimensions: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        """The only dimension of the unit, "" if there are others."""
        return self.dimensions[0][0] if len(self.dimensions) == 1 and self.dimensions[0][1] == 1 else ""


def split_unit(text: str) -> tuple[str, Unit | None]:
    """Split a canonical text into its expression and its unit, None if it has none."""
    sign, money, rest = re.fullmatch(r"([-+]?) ?([$€£]?) ?(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
    if money:
        body, unit = split_unit(rest)
        named = _unit_of(money)
        return (f"{sign}{body}", named) if unit is None or unit == named else (text, None)
    if scaled := _SCALE.fullmatch(rest):
        rest = f"{scaled['digits']}\\times10^{{{_SCALES[scaled['scale']]}}}{scaled['text'] or ''}{scaled['rest']}"
        text = sign + rest.replace(r"\text{}", "")
    split = max(0, len(text) - _MOST_UNIT_CHARS)
    match = _TRAILING.fullmatch(text, split)
    if match is None:
        return text, None
    body, words = (text[:split] + match["body"]).strip(), match["unit"]
    unit = _unit_of(plain(words).strip(" ."))
    if unit is None or (r"\circ" in words and re.search(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])", body)):
        return text, None
    return (body, unit) if _is_unit(unit, words, body) else (text, None)


def _is_unit(unit: Unit, words: str, body: str) -> bool:
    """Return True if words after an expression are a unit, no variables: letters outside `\\text` must be known."""
    known = all(name in _SIZES for name, _ in unit.dimensions)
    outside = re.findall(r"[A-Za-z]+", re.sub(r"\\text\{[^{}]*\}|\\circ ?[CF]?", " ", words))
    if any(len(word) == 1 for word in outside) and not (known and "/" in words and words.startswith(" ")):
        return False
    if known:
        return True
    return number(body) is not None and all(len(word) > 3 or _named(word) for word in outside)


@lru_cache(maxsize=1024)
def _unit_of(words: str) -> Unit | None:
    """Return the unit that words name; an unknown noun is a dimension of its own."""
    for symbol, name in _SYMBOLS.items():
        words = words.replace(symbol, name)
    tokens = re.findall(r"\^\\circ|[A-Za-z]+|[$€£¢%/]|\^\d", words)
    if not tokens or len(tokens) > _MOST_UNIT_WORDS or "".join(tokens) != re.sub(r"[\s.{}-]", "", words):
        return None
    dimensions: Counter[str] = Counter()
    size, sign, power, unknown, nouns = Fraction(1), 1, 1, "", 0
    for place, token in enumerate(tokens):
        lower = token.lower()
        if lower in ("/", "per"):
            sign = -1
        elif lower in ("square", "sq", "cubic", "cu"):
            power = 3 if lower.startswith("cu") else 2
        elif lower in ("squared", "cubed", "^2", "^3"):
            continue  # read with the unit before it
        elif lower in _NO_UNIT:
            return None
        else:
            nouns += 1
            following = tokens[place + 1].lower() if place + 1 < len(tokens) else ""
            power = {"squared": 2, "^2": 2, "cubed": 3, "^3": 3}.get(following, power)
            found = _named(token)
            if found is None:
                unknown, power = lower.rstrip("s"), 1
                continue
            dimensions[found[0]] += sign * power
            size *= found[1] ** (sign * power)
            power = 1
    if not nouns:
        return None
    if unknown:  # the last noun counts: "paper clips" are clips
        dimensions[unknown] += 1
    return Unit(size, tuple(sorted((name, power) for name, power in dimensions.items() if power and name)))


def _named(token: str) -> tuple[str, Fraction] | None:
    for name in (token, token.lower(), token.lower().removesuffix("s"), token.lower().removesuffix("es")):
        if name in _UNITS:
            return _UNITS[name]
    return None


class Quantity(NamedTuple):
    """A number with its unit, None if it states none."""

    number: Number
    unit: Unit | None


def quantity(text: str) -> Quantity | None:
    """Return the number with unit that a canonical text writes, None if it writes none."""
    body, unit = split_unit(text)
    value = number(body)
    return None if value is None else Quantity(value, unit)


def equal_quantities(gold: Quantity, given: Quantity) -> bool:
    """Return whether two quantities are equal; bare numbers are compared with percentages in either convention."""
    (left, unit), (right, other) = gold, given
    if unit is None or other is None or not unit.dimensions or not other.dimensions:
        percent = ("percent" if unit is None else unit.name, "percent" if other is None else other.name)
        if unit is not other and percent == ("percent", "percent"):
            share, bare = (left, right) if unit is not None else (right, left)
            as_written = share.equals(bare) and (unit is not None or abs(bare.value) > 1)
            return as_written or _scaled(share, Fraction(1, 100)).equals(bare)
        return left.equals(right)
    if unit.dimensions != other.dimensions:
        return False
    return _scaled(left, unit.size).equals(_scaled(right, other.size))


def _scaled(value: Number, factor: Fraction) -> Number:
    return Number(value.value * factor, None if value.ulp is None else value.ulp * factor)


# --- times of day -----------------------------------------------------------------------------------------------------

_TIME: Final = re.compile(r"(\d{1,2})(?::(\d\d))?(?::(\d\d))? ?(?:([AaPp])\.? ?[Mm]\.?)?")
_NAMED_TIMES: Final = {"noon": (43_200, "exact"), "midnight": (0, "exact")}


def time_of_day(text: str) -> tuple[int, str] | None:
    """Return the seconds since midnight or noon, and "a", "p" or "" as a plain text states; None if it is no time."""
    if text.lower() in _NAMED_TIMES:
        return _NAMED_TIMES[text.lower()]
    match = _TIME.fullmatch(text)
    if match is None or not (match[2] or match[4]):
        return None
    hours, minutes, seconds = int(match[1]), int(match[2] or 0), int(match[3] or 0)
    if hours > 24 or minutes > 59 or seconds > 59:
        return None
    half = (match[4] or "").lower()
    if half:
        if not 1 <= hours <= 12:
            return None
        hours = hours % 12 + (12 if half == "p" else 0)
    return 3600 * hours + 60 * minutes + seconds, "exact" if half or hours > 12 or hours == 0 else ""


def equal_times(gold: tuple[int, str], given: tuple[int, str]) -> bool:
    """Return whether two times are equal; a ground truth that leaves the half of the day open accepts both."""
    if gold[1] == given[1]:
        return gold[0] == given[0]
    return not gold[1] and gold[0] % 43_200 == given[0] % 43_200
