"""`Filtering`: asks the recipe's filter about finished groups, and counts what it has done, for the actor's heartbeat.

What it refuses is put nevertheless, with the reason: the trainer accounts for it, and people may read it.
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

#: Under which name it is counted.
_NAME: Final = "filter"


@final
class Filtering:
    """The filter of a recipe, or none, which keeps every group."""

    def __init__(self, group_filter: GroupFilter | None = None) -> None:
        self._filter = group_filter
        self._tally = VerifierTally()

    @property
    def figures(self) -> VerifierFigures:
        """What it has done so far: a group that it keeps or refuses is judged."""
        return self._tally.by_domain.get(_NAME, VerifierFigures())

    async def refusal(self, order: PromptOrder, made: Sequence[MadeRollout]) -> str:
        """Why the group may not train; empty where it may, or is not to train, or was judged by nobody."""
        if self._filter is None or order.purpose is not Purpose.TRAINING:
            return ""
        verdicts = [each.rollout.verdict for each in made]
        if not any(verdict.outcome.is_judgement for verdict in verdicts):
            return ""  # what its verifier has failed on is filtered for that
        sampled = [
            SampledAnswer(each.text, each.rollout.turns[-1].token_ids.tolist(), each.rollout.finish_reason)
            for each in made
        ]
        judgement = await self._filter.judge(order.problem, sampled, verdicts)
        self._tally.note(_NAME, [judgement])
        return refusal_of(judgement.verdict)
