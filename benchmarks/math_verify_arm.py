"""The judging of math answers by math-verify alone, an arm of the benchmark `math_answers`.

This file imports nothing else, since a worker process that has started threads cannot be forked.
"""

from __future__ import annotations

import logging
from collections.abc import Callable


def open_math_verify(_: str) -> Callable[[list[str]], bool]:
    """Return the function of a worker that judges `[ground truth, answer]` with math-verify alone."""
    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def equal(question: list[str]) -> bool:
        gold, answer = question
        marked = any(mark in gold for mark in ("$", r"\boxed", "####"))
        wanted = parse(gold if marked else f"${gold}$", parsing_timeout=None)
        return bool(verify(wanted, parse(answer, parsing_timeout=None), timeout_seconds=None))

    equal(["x+1", r"\boxed{1+x}"])
    return equal
