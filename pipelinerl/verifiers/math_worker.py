"""Compares expressions with `math-verify`, in a process of its own (`worker_process.py`), whose memory is limited.

`[gold, given]` → true, false, or null when the library failed.
"""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from typing import Final

_MEMORY_BYTES: Final = 2 << 30


def open_comparison(_: str) -> Callable[[list[str]], bool | None]:
    """Import the library and limit the memory; returns what compares."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    def equal(question: list[str]) -> bool | None:
        try:
            gold, given = (parse(f"${text}$", parsing_timeout=None, raise_on_error=True) for text in question)
            if not gold:
                return None
            return bool(given) and bool(verify(gold, given, timeout_seconds=None, raise_on_error=True))
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
            return None
        except TimeoutException:
            return None

    equal(["x+1", "1+x"])  # what the library does at its first use, its workers then need not do
    return equal
