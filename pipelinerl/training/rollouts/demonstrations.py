"""Right answers as training data: the loss of imitation, and what trains beside the rollouts of each optimizer step.

A demonstration is the prompt of a problem, as a sampler would get it, followed by `ground_truth` and the token that
ends an answer. The demonstrations of a step depend on its number alone, so a resumed run continues with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, final

import numpy as np

from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.presets import resolve
from pipelinerl.training.rollouts.batch import build
from pipelinerl.types import Outcome, Problem, Rollout, RolloutGroup, Turn, Verdict, VersionSpan
from trainer_contract.types import MicroBatch

#: Cross-entropy as five slots: the mean of log π_θ over the tokens of all demonstrations.
IMITATION: Final = resolve({"agg": "batch", "is_weight": "one", "adv": "constant", "grad1": "logprob", "grad2": "none"})


def demonstration(problem: Problem, tokenizer: ChatTokenizer, index: int) -> RolloutGroup:
    """Return the right answer to a problem as a group of one rollout."""
    answer = [*tokenizer.encode(problem.ground_truth), min(tokenizer.eos_token_ids)]
    turn = Turn(
        context_token_ids=np.array(tokenizer.encode_chat(problem.messages), np.int32),
        token_ids=np.array(answer, np.int32),
        behavior_logprobs=np.zeros(len(answer), np.float32),
        spans=(VersionSpan(0, len(answer)),),
    )
    right = Verdict(outcome=Outcome.CORRECT, reward=1.0)
    rollout = Rollout(turns=(turn,), verdict=right, finish_reason="stop", temperature=1.0)
    return RolloutGroup(
        group_id=f"demonstration-{index}", index=index, domain=problem.domain, actor="", rollouts=(rollout,)
    )


def imitated(groups: Sequence[RolloutGroup], *, token_budget: int, width: int) -> list[MicroBatch]:
    """Return the micro-batches of demonstrations; their weights sum to 1."""
    return build(groups, objective=IMITATION, token_budget=token_budget, producing=1, width=width).micro_batches


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ImitationStream:
    """The demonstrations that train beside the rollouts: a stream of loss with a denominator of its own.

    Attributes:
        problem: problem i ≥ 0.
        count: demonstrations of each optimizer step. Those of more than `most_tokens` tokens are left out.
        weight: factor of their mean cross-entropy beside the objective's loss.
        token_budget: the most tokens of a micro-batch.
    """

    problem: Callable[[int], Problem]
    tokenizer: ChatTokenizer
    count: int
    weight: float
    most_tokens: int
    token_budget: int

    def groups(self, step: int) -> list[RolloutGroup]:
        """Return the demonstrations of the optimizer step with this number, from 0."""
        made = (
            demonstration(self.problem(i), self.tokenizer, i) for i in range(step * self.count, (step + 1) * self.count)
        )
        return [group for group in made if group.rollouts[0].num_tokens <= self.most_tokens]

    def micro_batches(self, step: int, *, width: int) -> list[MicroBatch]:
        """Return the packed demonstrations of that step; their weights sum to `weight`, or there are none."""
        groups = self.groups(step)
        batch = imitated(groups, token_budget=self.token_budget, width=width) if groups else []
        return [replace(each, weights=each.weights * np.float32(self.weight)) for each in batch]
