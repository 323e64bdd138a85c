"""What people may read of a held-out problem: its messages and its answers as text, cut to a bounded length.

The text is what the verifier judged, as the engine gave it: without the special tokens that an engine leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from pipelinerl.actor.rollouts import Answer
from pipelinerl.messages import ShownAnswer, ShownProblem
from pipelinerl.observability.samples.record import MOST_CHARACTERS, shortened
from pipelinerl.types import MOST_SHOWN, PromptOrder

#: So many of the answers to one problem are shown.
_MOST_ANSWERS: Final = 16


def shown_problem(order: PromptOrder, answers: Sequence[Answer]) -> ShownProblem:
    """The problem of an order with its first answers."""
    prompt = "\n".join(f"{message.role}: {message.content}" for message in order.problem.messages)
    return ShownProblem(
        problem_id=order.problem.problem_id,
        prompt=shortened(prompt, MOST_CHARACTERS),
        ground_truth=order.problem.ground_truth[:MOST_SHOWN],
        answers=[_shown(answer) for answer in answers[:_MOST_ANSWERS]],
    )


def _shown(answer: Answer) -> ShownAnswer:
    choice, verdict = answer.choice, answer.verdict
    return ShownAnswer(
        text=shortened(choice.message.content, MOST_CHARACTERS),
        outcome=verdict.outcome.value,
        reward=verdict.reward if math.isfinite(verdict.reward) else 0.0,
        reason=shortened(verdict.reason, MOST_SHOWN),
        finish_reason=choice.finish_reason.value,
        num_tokens=len(choice.token_ids or ()),
        spans=[(version, tokens) for version, tokens in choice.version_spans or ()],
    )
