"""`Judgements`: how verifiers have done of late, as an actor's heartbeat tells it.

A verifier that fails says nothing of the answer, and the group is masked: a run whose verifiers all fail samples for
ever and learns nothing. The controller ends it, and needs to know how many failed in a row, and why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from pipelinerl.types import Verdict


@final
@dataclass(slots=True)
class Judgements:
    """Counts since the actor began: verdicts that judge an answer, and how many since the last have not."""

    judged: int = 0
    unjudged_in_a_row: int = 0
    reason: str = ""

    def note(self, domain: str, verdict: Verdict) -> None:
        """Count one verdict on an answer of `domain`."""
        if verdict.outcome.is_judgement:
            self.judged, self.unjudged_in_a_row, self.reason = self.judged + 1, 0, ""
        else:
            self.unjudged_in_a_row += 1
            self.reason = f"{domain}: {verdict.outcome}: {verdict.reason}"
