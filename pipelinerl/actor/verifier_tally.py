"""Counts of an actor's verdicts by domain, for its heartbeat.

A group on which the verifier fails is masked. If the verifier of a domain always fails, the domain is sampled forever
without effect; the controller detects this from these counts and ends the run.
"""

from __future__ import annotations

from collections.abc import Sequence
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
        self.by_domain: dict[str, VerifierFigures] = {}

    def note(self, domain: str, judgements: Sequence[Judgement]) -> None:
        """Count the verdicts on answers of `domain`."""
        figures = self.by_domain.get(domain, VerifierFigures())
        for verdict, seconds in judgements:
            figures = _counted(replace(figures, seconds=figures.seconds + seconds), verdict)
        self.by_domain[domain] = figures

    def note_episode(self, domain: str, calls: ToolCalls, environment_s: float) -> None:
        """Count an episode, its tool calls, and its seconds outside the model."""
        figures = self.by_domain.get(domain, VerifierFigures())
        self.by_domain[domain] = replace(
            figures,
            tool_episodes=figures.tool_episodes + calls.offered,
            calls_parsed=figures.calls_parsed + calls.parsed,
            calls_malformed=figures.calls_malformed + calls.malformed,
            episodes=figures.episodes + 1,
            environment_s=figures.environment_s + environment_s,
            tool_errors=figures.tool_errors + calls.failed,
        )


def _counted(figures: VerifierFigures, verdict: Verdict) -> VerifierFigures:
    reason = f"{verdict.outcome}: {verdict.reason}"
    if verdict.outcome.is_judgement:
        return replace(figures, judged=figures.judged + 1, errors_in_a_row=0, timeouts_in_a_row=0, reason="")
    if verdict.outcome is Outcome.TIMEOUT:
        in_a_row = figures.timeouts_in_a_row + 1
        return replace(figures, timeouts=figures.timeouts + 1, timeouts_in_a_row=in_a_row, reason=reason)
    return replace(figures, errors=figures.errors + 1, errors_in_a_row=figures.errors_in_a_row + 1, reason=reason)
