r"""Equality of two expressions that math-verify parses: exact for rational ones, else by 50 digits or by points.

math-verify's own comparison rounds to six decimals and drops small terms (1/2004! = 1/2006!), so only its parser is
used, and its comparison only for sets, which have no value. Two expressions with variables are equal if they agree at
points of both signs, exactly or to 40 digits; a wrong identity that holds at all of them is as good as impossible
(Schwartz 1980, Zippel 1979).

Nothing with more than a million digits is evaluated, so a tower of powers costs no time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, Final

import sympy
from latex2sympy2_extended.latex2sympy2 import NormalizationConfig, latex2sympy, normalize_latex
from math_verify import verify
from math_verify.errors import TimeoutException
from math_verify.grader import should_treat_as_complex

from pipelinerl.plugins.math_answer.quantities import number

#: Errors that parser and simplifier raise for texts that they cannot handle.
FAILURES: Final = (
    ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, RecursionError,
    SyntaxError, TimeoutException, TypeError, ValueError,
)  # fmt: skip
#: Repairs before parsing; removing units is left out, since it would turn variables into nothing.
_SPELLING: Final = NormalizationConfig(basic_latex=True, malformed_operators=True, boxed="none")
#: Largest number of decimal digits of a value that is evaluated.
_MOST_DIGITS: Final = 1e6
_DIGITS: Final = 50
_TOLERANCE: Final = sympy.Float(10, _DIGITS) ** -40
_INTEGERS: Final = frozenset("nmkNMK")
_POINTS: Final = ("2/7", "5/3", "13/4", "-3/5", "-11/6", "29/7", "1/9", "-17/3")
_COUNTS: Final = (3, 5, 8, 12, 7, 4, 11, 6)
_LEAST_POINTS: Final = 3
#: Deepest nesting of brackets that is parsed; the parser's time doubles with each level of some.
_MOST_NESTED: Final = 12
#: Capital letters, which the parser would read as small ones; not those of names such as \\overline{AB}.
_CAPITAL: Final = re.compile(
    r"\\(?:overline|mathbb|mathcal|widehat|vec|hat|bar)\{[^{}]*\}|\\(?P<greek>[A-Z])(?P<rest>[a-z]+)|\\[A-Za-z]+|_\{[^{}]*\}|_\w"
    r"|(?P<letter>[A-Z])(?:_(?P<mark>\w|\{[^{}]*\}))?"
)


class UnreadableReference(ValueError):
    """The parser cannot read the ground truth, or its value has too many digits."""


class _TooLarge(ValueError):
    pass


def equal_expressions(gold: str, given: str) -> bool:
    """Return whether two expressions are equal. Raises `UnreadableReference` if the ground truth cannot be compared."""
    try:
        wanted = _parsed(gold)
        if wanted is not None:
            _digits(wanted)
    except FAILURES:
        wanted = None
    if wanted is None:
        raise UnreadableReference(f"math-verify cannot read {gold[:80]!r}")
    try:
        stated = _parsed(given)
        return stated is not None and _equal(wanted, stated, gold, given)
    except FAILURES:
        return False


def _parsed(text: str) -> Any:
    if not _is_balanced(text):
        return None
    text = re.sub(r"(\d+(?:\.\d+)?)\^\\circ", r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _CAPITAL.sub(_marked_capital, text)
    try:
        tree = latex2sympy(
            normalize_latex(text, _SPELLING),
            is_real=not should_treat_as_complex(text),
            convert_degrees=False,
            normalization_config=None,
        )
    except Exception:  # the parser raises plain `Exception` for a syntax error
        return None
    if not isinstance(tree, sympy.Basic | sympy.MatrixBase):
        return None
    exact = {one: sympy.Rational(str(one)) for one in tree.atoms(sympy.Float)}
    names = {one: sympy.Symbol(one.name) for one in tree.free_symbols}
    imaginary = {sympy.Symbol("i"): sympy.I} if sympy.Symbol("i") in names.values() else {}
    return tree.xreplace(exact).xreplace(names).xreplace(imaginary)


def _is_balanced(text: str) -> bool:
    depth = 0
    for bracket in re.findall(r"[({\[\])}]", text):
        depth += 1 if bracket in "({[" else -1
        if not 0 <= depth <= _MOST_NESTED:
            return False
    return depth == 0


def _marked_capital(match: re.Match[str]) -> str:
    if match["greek"]:
        return rf"\{match['greek'].lower()}{match['rest']}_{{u}}"
    if match["letter"]:
        return f"{match['letter']}_{{u{(match['mark'] or '').strip('{}')}}}"
    return match[0]


def _equal(gold: Any, given: Any, gold_text: str, given_text: str) -> bool:
    if gold == given:
        undefined = sympy.zoo, sympy.nan
        is_constant = isinstance(gold, sympy.Expr) and not gold.free_symbols
        return not (gold.has(*undefined) or (is_constant and gold.doit().has(*undefined)))
    relations = (
        isinstance(gold, sympy.core.relational.Relational),
        isinstance(given, sympy.core.relational.Relational),
    )
    if all(relations):
        return _equal_relations(gold, given)
    if any(relations):
        return False
    if not (isinstance(gold, sympy.Expr) and isinstance(given, sympy.Expr)):
        return not isinstance(given, sympy.Expr) and bool(verify(gold, given, timeout_seconds=None))
    _digits(given)
    names = sorted((gold.free_symbols | given.free_symbols), key=lambda symbol: str(symbol.name))
    if not names:
        return _equal_constants(gold, given, gold_text, given_text)
    return _agree([(gold, given)], names)


def _equal_constants(gold: Any, given: Any, gold_text: str, given_text: str) -> bool:
    exact = _rational(gold), _rational(given)
    if exact[0] is not None and exact[1] is not None:
        return exact[0] == exact[1]
    values = _value(gold), _value(given)
    if values[0] is None or values[1] is None:
        return False
    if _near(*values):
        return True
    for literal, value in ((number(gold_text), values[1]), (number(given_text), values[0])):
        if literal is not None and literal.ulp is not None and value.is_real:
            return literal.may_be(Fraction(str(value)))
    return False


def _agree(pairs: Sequence[tuple[Any, Any]], names: Sequence[Any]) -> bool:
    """Return True if the expressions of each pair agree at all points where they have values, and these suffice."""
    compared = 0
    for place in range(len(_POINTS)):
        point = {
            name: sympy.Integer(_COUNTS[(place + 3 * nth) % len(_COUNTS)])
            if name.name in _INTEGERS
            else sympy.Rational(_POINTS[(place + 3 * nth) % len(_POINTS)])
            for nth, name in enumerate(names)
        }
        for gold, given in pairs:
            left, right = (_at(tree, point) for tree in (gold, given))
            if left is None or right is None:
                if (left is None) != (right is None) and all(value > 0 for value in point.values()):
                    return False
                continue
            if not _near(left, right):
                if left.is_real or right.is_real or gold.has(sympy.I):
                    return False
                continue
            compared += 1
    return compared >= _LEAST_POINTS * len(pairs)


def _at(tree: Any, point: dict[Any, Any]) -> Any:
    placed = tree.xreplace(point)
    exact = _rational(placed)
    return sympy.Rational(exact.numerator, exact.denominator) if exact is not None else _value(placed)


def _equal_relations(gold: Any, given: Any) -> bool:
    """Return True for equivalent relations: their differences have a constant ratio, positive for inequalities."""
    flipped = {sympy.Lt: sympy.Gt, sympy.Gt: sympy.Lt, sympy.Le: sympy.Ge, sympy.Ge: sympy.Le}
    same, turned = type(gold) is type(given), flipped.get(type(gold)) is type(given)
    if not (same or turned):
        return False
    left, right = gold.lhs - gold.rhs, given.lhs - given.rhs
    names = sorted(left.free_symbols | right.free_symbols, key=lambda symbol: str(symbol.name))
    if left.free_symbols != right.free_symbols or not names:
        return False
    _digits(right)
    for shift in range(len(_POINTS)):
        point = {name: sympy.Rational(_POINTS[(shift + 2 * nth) % len(_POINTS)]) for nth, name in enumerate(names)}
        values = _at(left, point), _at(right, point)
        if all(value is not None and value.is_real and value != 0 for value in values):
            ratio = sympy.nsimplify(values[0] / values[1], rational=True)
            if not isinstance(gold, sympy.Eq | sympy.Ne) and (ratio > 0) != same:
                return False
            return _agree([(left, ratio * right)], names)
    return False


# --- values -----------------------------------------------------------------------------------------------------------


def _near(left: Any, right: Any) -> bool:
    if left == right:
        return True
    difference, size = abs(left - right), max(abs(left), abs(right))
    return bool(difference <= _TOLERANCE * size)


def _value(tree: Any) -> Any:
    """Return the value of a constant tree to 50 digits, None if it has no finite one."""
    _digits(tree)
    value = sympy.N(tree.doit(), _DIGITS)
    if value in (sympy.oo, -sympy.oo):
        return None
    if not value.is_number or value.has(sympy.zoo, sympy.nan, sympy.oo) or not isinstance(value, sympy.Expr):
        return None
    real, imaginary = value.as_real_imag()
    if not (real.is_Number and imaginary.is_Number):
        return None
    if imaginary and abs(imaginary) < _TOLERANCE * abs(real):
        return real
    if real and abs(real) < _TOLERANCE * abs(imaginary):
        return imaginary * sympy.I
    return value


def _rational(tree: Any) -> Fraction | None:
    """Return the exact value of a tree of rational operations, None for other trees. Raises `_TooLarge`."""
    if isinstance(tree, sympy.Rational):
        return Fraction(int(tree.p), int(tree.q))
    if not isinstance(tree, sympy.Add | sympy.Mul | sympy.Pow | sympy.factorial | sympy.UnevaluatedExpr):
        return None
    values = [_rational(part) for part in tree.args]
    if any(value is None for value in values):
        return None
    known = [value for value in values if value is not None]
    _digits(tree)
    if isinstance(tree, sympy.Add):
        return sum(known, Fraction(0))
    if isinstance(tree, sympy.Mul):
        return math.prod(known, start=Fraction(1))
    if isinstance(tree, sympy.Pow):
        base, exponent = known
        return base ** int(exponent) if exponent.denominator == 1 and (base or exponent > 0) else None
    if isinstance(tree, sympy.UnevaluatedExpr):
        return known[0]
    return Fraction(math.factorial(int(known[0]))) if known[0].denominator == 1 and known[0] >= 0 else None


def _digits(tree: Any) -> float:
    """Return a bound on the decimal digits of a tree's value before and after the point. Raises `_TooLarge`."""
    if isinstance(tree, sympy.Rational):
        return math.log10(abs(int(tree.p)) + 1) + math.log10(int(tree.q))
    if not getattr(tree, "args", ()):
        return 1.0
    parts = [_digits(part) for part in tree.args]
    if isinstance(tree, sympy.Pow | sympy.exp):
        digits = (parts[0] if isinstance(tree, sympy.Pow) else 1.0) * _size(tree.args[-1], parts[-1])
    elif isinstance(tree, sympy.factorial | sympy.gamma | sympy.binomial):
        digits = _size(tree.args[0], parts[0]) * max(1.0, parts[0])
    else:
        digits = sum(parts)
    if digits > _MOST_DIGITS:
        raise _TooLarge
    return digits


def _size(exponent: Any, digits: float) -> float:
    """Return a bound on the size of an exponent; variables count as points of `_agree`, 12 at most."""
    value = _approximate(exponent)
    return value if value is not None else 10.0 ** min(digits, 300)


def _approximate(tree: Any) -> float | None:
    if isinstance(tree, sympy.Rational):
        return abs(tree.p / tree.q) if tree.p.bit_length() < 900 else math.inf
    if isinstance(tree, sympy.Symbol):
        return 12.0
    if tree in (sympy.pi, sympy.E, sympy.I):
        return 3.2
    parts = [_approximate(part) for part in tree.args]
    if isinstance(tree, sympy.Add | sympy.Mul) and all(part is not None for part in parts):
        known = [part for part in parts if part is not None]
        return sum(known) if isinstance(tree, sympy.Add) else math.prod(known)
    return None


#: Expressions that warm up the caches: the first of each kind takes up to a quarter of a second.
WARM_UP: Final = (
    ("x+1", "1+x"), (r"\frac{3}{4}", r"\frac{\sqrt{2}}{3}"), ("x^2+5x+6", "(x+2)(x+3)"), (r"4\sqrt{5}", r"\sqrt{80}"),
    ("y=2x+1", "y-2x=1"), (r"\sin(x)^2", r"1-\cos(x)^2"), (r"e^{2}\ln 3", r"2\pi"), ("n!", r"\binom{n}{2}"),
    (r"3+4i", "4i+3"), (r"\sqrt[3]{2}", r"2^{1/3}"),
)  # fmt: skip
