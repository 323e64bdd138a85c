"""Compares expressions with `math-verify`, in a separate process (`worker_process.py`) with limited memory.

A question is `[gold, given]`; the reply is true, false, or null if the library fails on `gold` itself. If the library
fails only on the answer, the answer counts as not equal; otherwise a model could learn to crash it.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from typing import Final

_MEMORY_BYTES: Final = 2 << 30
#: Expressions that warm up the caches of parser and simplifier. Each new kind of expression costs up to a quarter of a
#: second, which a worker that replaces a killed one would otherwise spend on its first answers.
_EACH_KIND: Final = (
    ["x+1", "1+x"],
    [r"\frac{3}{4}", "6/8"],
    ["x^2+5x+6", "(x+2)(x+3)"],
    ["x^2+5x+6", "(x+2)(x-3)"],
    [r"4\sqrt{5}", r"\sqrt{80}"],
    [r"4\sqrt{5}", r"\sqrt{81}"],
    [r"\{1,2,3\}", r"\{3,1,2\}"],
    [r"\{1,2\}", r"\{2,3\}"],
    [r"[1,2)\cup(3,\infty)", "(3,4)"],
    ["(1,2)", "(2,1)"],
    ["x=3", "3"],
    [r"x\le 3", r"3\ge x"],
    [r"\sin(x)^2", r"1-\cos(x)^2"],
    [r"e^{2}\ln 3", r"2\pi"],
    [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"],
    [r"50\%", "0.5"],
)


def open_comparison(_: str) -> Callable[[list[str]], bool | None]:
    """Import the library and limit the memory; return the comparison function."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    failures = (
        ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError, RecursionError, SyntaxError,
        TimeoutException, TypeError, ValueError,
    )  # fmt: skip

    def compared(gold: str, given: str) -> bool | None:
        try:
            first, second = (parse(f"${text}$", parsing_timeout=None, raise_on_error=True) for text in (gold, given))
            if not first:
                return None
            return bool(second) and bool(verify(first, second, timeout_seconds=None, raise_on_error=True))
        except failures:
            return None

    def equal(question: list[str]) -> bool | None:
        gold, given = question
        result = compared(gold, given)
        if result is None and given != gold and compared(gold, gold):
            return False
        return result

    for question in _EACH_KIND:  # the library does work at first use, which this does in advance
        equal(question)
    return equal
