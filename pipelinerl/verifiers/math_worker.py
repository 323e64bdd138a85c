"""Compares expressions with `math-verify`, in a process of its own (`worker_process.py`), whose memory is limited.

`[gold, given]` → true, false, or null when the library fails on `gold` itself. An answer on which it fails, where it
works on `gold`, is not equal: otherwise a model could learn to crash it.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from typing import Final

_MEMORY_BYTES: Final = 2 << 30
#: Parser and simplifier fill caches as they meet a kind of expression for the first time, up to a quarter of a second
#: each. A worker that takes the place of one that was killed would else take so long for its first answers.
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
    """Import the library and limit the memory; returns what compares."""
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
        found = compared(gold, given)
        if found is None and given != gold and compared(gold, gold):
            return False
        return found

    for question in _EACH_KIND:  # what the library does at its first use of each, no worker then has to do
        equal(question)
    return equal
