"""From an engine's answer to a `RolloutGroup`: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inference_contract.schemas import ChatCompletion, Choice
from pipelinerl.errors import RecordError
from pipelinerl.types import PromptOrder, Rollout, RolloutGroup, Turn, Verdict, VersionSpan


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, the completion it came in, and what the verifier found."""

    completion: ChatCompletion
    choice: Choice
    verdict: Verdict


def assemble(order: PromptOrder, answers: Sequence[Answer], *, actor: str) -> RolloutGroup:
    """The group of an order from its verified answers.

    Raises:
        RecordError: the engine left out what a rollout needs (token ids, log-probs, version spans), or they do not fit.
    """
    return RolloutGroup(
        group_id=order.order_id,
        index=order.index,
        domain=order.problem.domain,
        actor=actor,
        rollouts=tuple(_rollout(order, answer) for answer in answers),
    )


def _rollout(order: PromptOrder, answer: Answer) -> Rollout:
    choice, prompt = answer.choice, answer.completion.prompt_token_ids
    if prompt is None or choice.token_ids is None or choice.token_logprobs is None or choice.version_spans is None:
        raise RecordError(
            f"{order.order_id}: the engine must answer with prompt_token_ids, token_ids, token_logprobs and "
            "version_spans when return_token_ids is set; run `pipelinerl conformance engine URL` against it"
        )
    tokens, logprobs, spanned = (
        len(choice.token_ids),
        len(choice.token_logprobs),
        sum(n for _, n in choice.version_spans),
    )
    if not (prompt and tokens) or not tokens == logprobs == spanned:
        raise RecordError(
            f"{order.order_id}: expected a prompt, and as many token_logprobs as token_ids with version_spans over all "
            f"of them; the engine answered with {len(prompt)} prompt tokens, {tokens} tokens, {logprobs} log-probs and "
            f"spans over {spanned}"
        )
    turn = Turn(
        context_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(choice.token_ids, np.int32),
        behavior_logprobs=np.array(choice.token_logprobs, np.float32),
        spans=tuple(VersionSpan(*span) for span in choice.version_spans),
    )
    return Rollout(
        turns=(turn,),
        verdict=answer.verdict,
        finish_reason=choice.finish_reason.value,
        temperature=order.sampling.temperature or 1.0,
        epoch=answer.completion.epoch,
    )
