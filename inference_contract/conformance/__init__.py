"""The conformance kit: does whatever serves this URL keep the inference contract?

    results = run("http://127.0.0.1:8000", token="…")

The kit talks HTTP, and plays the trainer in a real process group, and the server that weights are pulled from. It
leaves other weights behind than it found (the engine serves, in the end, weights of the kit's own making, under a
higher epoch): use an engine that nobody needs.
Each check is a function that raises `AssertionError` with a sentence. What an engine cannot show is reported as
`unsupported` with the reason, never skipped in silence.

Needs httpx; the weight checks need torch and xxhash and import them on demand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import httpx

from inference_contract.conformance import (
    chat_checks,
    continuation_checks,
    openai_checks,
    pull_checks,
    refusal_checks,
    routing_checks,
    state_checks,
    stream_checks,
    weight_checks,
)
from inference_contract.conformance.session import NotOffered, Session

Check = Callable[[Session], None]

#: In this order: what later checks rely on comes first, and weights change last.
CHECKS: tuple[Check, ...] = (
    *state_checks.CHECKS,
    *chat_checks.CHECKS,
    *openai_checks.CHECKS,
    *stream_checks.CHECKS,
    *continuation_checks.CHECKS,
    *routing_checks.CHECKS,
    *refusal_checks.CHECKS,
    *weight_checks.CHECKS,
    *pull_checks.CHECKS,
)


class CheckOutcome(StrEnum):
    """Says how one check ended."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What a check found; `promise` is the sentence that it checks, `reason` says why it did not pass."""

    name: str
    promise: str
    outcome: CheckOutcome
    reason: str
    seconds: float


def run(
    url: str,
    token: str | None = None,
    *,
    only: Iterable[str] | None = None,
    timeout_s: float = 20.0,
    host: str = "127.0.0.1",
) -> list[CheckResult]:
    """Check the engine at `url`.

    Args:
        token: its bearer token, if it wants one.
        only: names of checks; None runs all.
        timeout_s: of every request, join and broadcast.
        host: address of this machine that the engine can reach, for the process group and the weight server.
    """
    chosen = select(only)
    with Session(url, token=token, timeout_s=timeout_s, host=host) as session:
        return [_result(check, session) for check in chosen]


def select(only: Iterable[str] | None) -> Sequence[Check]:
    """The checks of these names. Raises `ValueError` for a name that is none."""
    known = {check.__name__: check for check in CHECKS}
    if only is None:
        return CHECKS
    names = list(only)
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is no check; the checks are {', '.join(known)}")
    return [known[name] for name in names]


def _result(check: Check, session: Session) -> CheckResult:
    began = time.monotonic()
    outcome, reason = CheckOutcome.PASSED, ""
    try:
        check(session)
    except NotOffered as error:
        outcome, reason = CheckOutcome.UNSUPPORTED, str(error)
    except AssertionError as error:
        outcome, reason = CheckOutcome.FAILED, str(error)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError) as error:
        outcome, reason = CheckOutcome.FAILED, f"{type(error).__name__}: {error}"
    if outcome is CheckOutcome.FAILED:
        session.recover()
    promise = (check.__doc__ or "").strip().splitlines()[0]
    return CheckResult(check.__name__, promise, outcome, reason, time.monotonic() - began)
