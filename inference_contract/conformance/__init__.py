"""The conformance kit: checks that the engine at a URL keeps the inference contract.

    results = run("http://127.0.0.1:8000", token="…")

The kit talks HTTP. It plays the trainer in a real process group, and the server from which the engine pulls weights. It
overwrites the engine's weights with its own, under a higher epoch (number of the trainer process) than the engine's, so
run it only against an otherwise unused engine.

Each check is a function; if the engine fails it, the function raises `AssertionError` with an explanation. A promise
that cannot be tested on this engine is reported as `unsupported` with the reason. A check that passes may return what
it has measured, or what it does not cover.

Only with a model directory can the kit tell whether the engine computes what it should (`reference_checks`).

The kit needs httpx. The weight checks import torch and xxhash on demand, the reference checks transformers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import httpx

from inference_contract.conformance import (
    chat_checks,
    continuation_checks,
    conversation_checks,
    openai_checks,
    pull_checks,
    reference_checks,
    refusal_checks,
    stream_checks,
    weight_checks,
)
from inference_contract.conformance.session import Check, Expected, NotOffered, Session

#: The order matters: later checks rely on earlier ones, and weights change last.
CHECKS: tuple[Check, ...] = (
    *refusal_checks.STATE_CHECKS,
    *reference_checks.LOADED_CHECKS,
    *chat_checks.CHECKS,
    *openai_checks.CHECKS,
    *stream_checks.CHECKS,
    *continuation_checks.CHECKS,
    *conversation_checks.CHECKS,
    *openai_checks.ROUTING_CHECKS,
    *refusal_checks.REFUSAL_CHECKS,
    *weight_checks.CHECKS,
    *pull_checks.CHECKS,
    *reference_checks.UPDATE_CHECKS,
)


class CheckOutcome(StrEnum):
    """Outcome of one check."""

    PASSED = "passed"
    FAILED = "failed"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check; `reason` says why it failed or is unsupported, or what it has measured."""

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
    expected: Expected | None = None,
) -> list[CheckResult]:
    """Check the engine at `url`.

    Args:
        token: the engine's bearer token, if it requires one.
        only: names of checks; None runs all.
        timeout_s: limit for every request, join and broadcast.
        host: address of this machine that the engine can reach, for the process group and the weight server.
        expected: the model that the engine serves; None skips the checks against a reference.
    """
    chosen = select(only)
    with Session(url, token=token, timeout_s=timeout_s, host=host, expected=expected) as session:
        return [_result(check, session) for check in chosen]


def select(only: Iterable[str] | None) -> Sequence[Check]:
    """Return the checks with these names. Raises `ValueError` if a name is unknown."""
    known = {check.__name__: check for check in CHECKS}
    if only is None:
        return CHECKS
    names = list(only)
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r} is not a check; the checks are {', '.join(known)}")
    return [known[name] for name in names]


def _result(check: Check, session: Session) -> CheckResult:
    began = time.monotonic()
    outcome, reason = CheckOutcome.PASSED, ""
    try:
        reason = check(session) or ""
    except NotOffered as error:
        outcome, reason = CheckOutcome.UNSUPPORTED, str(error)
    except AssertionError as error:
        outcome, reason = CheckOutcome.FAILED, str(error)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, OSError) as error:
        outcome, reason = CheckOutcome.FAILED, f"{type(error).__name__}: {error}"
    if outcome is CheckOutcome.FAILED:
        session.recover()
    promise = " ".join((check.__doc__ or "").partition("\n\n")[0].split())
    return CheckResult(check.__name__, promise, outcome, reason, time.monotonic() - began)
