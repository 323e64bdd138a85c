"""The process in which `math-verify` runs: one JSON question per line in, one JSON answer per line out.

`{"gold": …, "given": …}` → `{"equal": true | false | null}`; null when the library failed. It limits its own memory,
and is killed by its parent when an answer is late.
"""

from __future__ import annotations

import json
import logging
import resource
import sys

_MEMORY_BYTES = 2 << 30


def main() -> None:
    """Answer until the input ends."""
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        question = json.loads(line)
        equal: bool | None
        try:
            gold, given = (
                parse(f"${question[name]}$", parsing_timeout=None, raise_on_error=False) for name in ("gold", "given")
            )
            if not gold:
                equal = None
            else:
                equal = bool(given) and verify(gold, given, timeout_seconds=None, raise_on_error=False)
        except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError):
            equal = None
        except TimeoutException:
            equal = None
        print(json.dumps({"equal": equal}), flush=True)


if __name__ == "__main__":
    main()
