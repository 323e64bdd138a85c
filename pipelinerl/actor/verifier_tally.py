"""`VerifierTally`: what the verifiers of an actor have done, domain by domain, for its heartbeat.

A verifier that fails says nothing of the answer, and its group is masked: a domain whose verifier always fails is
sampled for ever and teaches nothing. The controller ends such a run by what an actor's heartbeat says of this.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from msgspec.structs import replace

from pipelinerl.messages import VerifierFigures
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import Judgement


@final
class VerifierTally:
    """Counts verdicts since the actor began, and how many since the last that judges an answer have not."""

    def __init__(self) -> None:
        self._by_domain: dict[str, VerifierFigures] = {}

    def note(self, domain: str, judgements: Iterable[Judgement]) -> None:
        """Count the verdicts on answers of `domain`."""
        figures = self._by_domain.get(domain) or VerifierFigures()
        for verdict, seconds in judgements:
            figures = replace(figures, seconds=figures.seconds + seconds)
            match verdict.outcome:
                case Outcome.VERIFIER_ERROR:
                    figures = replace(
                        figures,
                        errors=figures.errors + 1,
                        errors_in_a_row=figures.errors_in_a_row + 1,
                        reason=f"{verdict.outcome}: {verdict.reason}",
                    )
                case Outcome.TIMEOUT:
                    figures = replace(
                        figures,
                        timeouts=figures.timeouts + 1,
                        timeouts_in_a_row=figures.timeouts_in_a_row + 1,
                        reason=f"{verdict.outcome}: {verdict.reason}",
                    )
                case _:
                    figures = replace(
                        figures, judged=figures.judged + 1, errors_in_a_row=0, timeouts_in_a_row=0, reason=""
                    )
        self._by_domain[domain] = figures

    @property
    def by_domain(self) -> dict[str, VerifierFigures]:
        """The counts so far."""
        return dict(self._by_domain)
