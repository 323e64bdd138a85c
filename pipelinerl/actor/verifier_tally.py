"""Counts of an actor's verdicts by domain, for its heartbeat.

A group on which the verifier fails is masked. If the verifier of a domain always fails, the domain is sampled forever
without effect; the controller detects this from these counts and ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import final

from msgspec.structs import replace

from pipelinerl.environments.episode import ToolCalls
from pipelinerl.messages import VerifierFigures
from pipelinerl.types import Outcome, Verdict
from pipelinerl.verifiers.verifier import Judgement


@final
class VerifierTally:
    """Counter of verdicts, episodes and tool calls since the actor started, and of failures in a row."""

    def __init__(self) -> None:
        self._by_domain: dict[str, VerifierFigures] = {}

    def note(self, domain: str, judgements: Sequence[Judgement]) -> None:
        """Count the verdicts on answers of `domain`."""
        figures = self._by_domain.get(domain) or VerifierFigures()
        for outcome, verdicts in groupby((verdict for verdict, _ in judgements), key=_kind):
            figures = _counted(figures, outcome, list(verdicts))
        seconds = figures.seconds + sum(seconds for _, seconds in judgements)
        self._by_domain[domain] = replace(figures, seconds=seconds)

    def note_episode(self, domain: str, calls: ToolCalls, environment_s: float) -> None:
        """Count an episode, its tool calls, and its seconds outside the model."""
        figures = self._by_domain.get(domain) or VerifierFigures()
        self._by_domain[domain] = replace(
            figures,
            tool_episodes=figures.tool_episodes + calls.offered,
            calls_parsed=figures.calls_parsed + calls.parsed,
            calls_malformed=figures.calls_malformed + calls.malformed,
            episodes=figures.episodes + 1,
            environment_s=figures.environment_s + environment_s,
            tool_errors=figures.tool_errors + calls.failed,
        )

    @property
    def by_domain(self) -> dict[str, VerifierFigures]:
        """The counts so far, by domain."""
        return dict(self._by_domain)


def _kind(verdict: Verdict) -> Outcome | None:
    return None if verdict.outcome.is_judgement else verdict.outcome


def _counted(figures: VerifierFigures, failure: Outcome | None, verdicts: Sequence[Verdict]) -> VerifierFigures:
    """Add consecutive verdicts to `figures`. All are failures of the kind `failure`; if None, all are judgements."""
    more = len(verdicts)
    if failure is None:
        return replace(figures, judged=figures.judged + more, errors_in_a_row=0, timeouts_in_a_row=0, reason="")
    reason = f"{failure}: {verdicts[-1].reason}"
    if failure is Outcome.TIMEOUT:
        timeouts, in_a_row = figures.timeouts + more, figures.timeouts_in_a_row + more
        return replace(figures, timeouts=timeouts, timeouts_in_a_row=in_a_row, reason=reason)
    errors, in_a_row = figures.errors + more, figures.errors_in_a_row + more
    return replace(figures, errors=errors, errors_in_a_row=in_a_row, reason=reason)
