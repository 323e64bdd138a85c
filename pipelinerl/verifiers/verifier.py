"""`Verifier`: judges what a model answered. Promises of each implementation:

A wrong answer is `wrong`; a verifier that fails or runs out of time says so (`verifier_error`, `timeout`) and such
rollouts are masked: an error of ours must never teach the model that its answer was bad. `verify` returns within its
deadline and does not block the event loop for longer than a few milliseconds.
"""

from __future__ import annotations

from typing import Final, Protocol

from pipelinerl.types import Outcome, Problem, Verdict

CORRECT: Final = Verdict(outcome=Outcome.CORRECT, reward=1.0)


class Verifier(Protocol):
    """One kind of judgement."""

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge `completion_text`, the whole answer without the end-of-turn token. Never raises for an answer."""
        ...


def wrong(reason: str) -> Verdict:
    """The answer was judged, and is not right."""
    return Verdict(outcome=Outcome.WRONG, reward=0.0, reason=reason)


def timed_out(seconds: float) -> Verdict:
    """No judgement was reached in time."""
    return Verdict(outcome=Outcome.TIMEOUT, reward=0.0, reason=f"no judgement within {seconds:g} s")


def failed(reason: str) -> Verdict:
    """The verifier itself failed."""
    return Verdict(outcome=Outcome.VERIFIER_ERROR, reward=0.0, reason=reason)
