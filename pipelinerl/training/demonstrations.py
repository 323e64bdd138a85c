"""Demonstrations: reference answers on which each optimizer step trains in addition to its rollouts.

A demonstration consists of a problem's prompt, encoded as for sampling, its `ground_truth`, and the token that ends an
answer. The demonstrations of a step depend only on the step's number, so a resumed run uses the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipelinerl.data.mixture import Mixture
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.objective.streams import CROSS_ENTROPY
from pipelinerl.training.batch import BatchRules, build
from pipelinerl.types import Outcome, Problem, Rollout, RolloutGroup, Turn, Verdict, VersionSpan
from trainer_contract.types import MicroBatch


def demonstration(problem: Problem, tokenizer: ChatTokenizer, index: int) -> RolloutGroup:
    """Return the reference answer to a problem as a group of one rollout."""
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


def imitated(groups: Sequence[RolloutGroup], rules: BatchRules) -> list[MicroBatch]:
    """Pack demonstrations for `CROSS_ENTROPY`; weights sum to 1, or to the factors of the domains' losses."""
    plain = BatchRules(token_budget=rules.token_budget, width=rules.width, losses=rules.losses)
    return build(groups, plain, objective=CROSS_ENTROPY, producing=1).micro_batches


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationStream:
    """The next `count` demonstrations for each optimizer step, without those above `most_tokens`."""

    problems: Mixture
    tokenizer: ChatTokenizer
    count: int
    most_tokens: int

    def groups(self, step: int) -> list[RolloutGroup]:
        numbers = range(step * self.count, (step + 1) * self.count)
        made = (demonstration(self.problems.problem(i), self.tokenizer, i) for i in numbers)
        return [group for group in made if group.rollouts[0].num_tokens <= self.most_tokens]

    def micro_batches(self, step: int, rules: BatchRules) -> list[MicroBatch]:
        groups = self.groups(step)
        return imitated(groups, rules) if groups else []
