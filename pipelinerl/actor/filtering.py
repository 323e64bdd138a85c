"""The recipe's group filter, applied to finished groups and counted for the actor's heartbeat.

A refused group is still appended, with the reason, so that the trainer can count it and users can inspect it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from pipelinerl.actor.group_maker import MadeRollout
from pipelinerl.actor.verifier_tally import VerifierTally
from pipelinerl.messages import VerifierFigures
from pipelinerl.types import PromptOrder, Purpose
from pipelinerl.verifiers.group_filter import GroupFilter, refusal_of
from pipelinerl.verifiers.verifier import SampledAnswer

#: Name under which the filter's verdicts are counted.
_NAME: Final = "filter"


@final
class Filtering:
    """The filter of a recipe; without a filter every group is kept."""

    def __init__(self, group_filter: GroupFilter | None = None) -> None:
        self._filter = group_filter
        self._tally = VerifierTally()

    @property
    def figures(self) -> VerifierFigures:
        """Counts of the filter's decisions so far. A group counts as judged whether the filter kept or refused it."""
        return self._tally.by_domain.get(_NAME, VerifierFigures())

    async def refusal(self, order: PromptOrder, made: Sequence[MadeRollout]) -> str:
        """Return the filter's reason to refuse the group, or "" if it keeps the group.

        Evaluations, and groups in which the verifier judged no answer, are not filtered.
        """
        if self._filter is None or order.purpose is not Purpose.TRAINING:
            return ""
        verdicts = [each.rollout.verdict for each in made]
        if not any(verdict.outcome.is_judgement for verdict in verdicts):
            return ""  # no need to filter: the trainer drops groups in which the verifier failed on every answer
        sampled = [
            SampledAnswer(each.text, each.rollout.turns[-1].token_ids.tolist(), each.rollout.finish_reason)
            for each in made
        ]
        judgement = await self._filter.judge(order.problem, sampled, verdicts)
        self._tally.note(_NAME, [judgement])
        return refusal_of(judgement.verdict)
