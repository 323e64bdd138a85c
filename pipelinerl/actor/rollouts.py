"""From engines' answers to a `RolloutGroup`, which is pure, and from there to the actor's partition of the rollouts.

`RolloutWriter` appends under numbers of its own choice, so that a repeated append is a no-op. What `append` has
returned for lies in the partition, once. It fences, too: of two actors of one name, the one that numbers from the
earlier clock finds its numbers passed. It must not take its groups for appended, and ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self, final

import numpy as np

from inference_contract.schemas import ChatCompletion, Choice
from pipelinerl.errors import FencedError, RecordError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.streams.records import encode_group
from pipelinerl.streams.stream import Stream, fresh_number
from pipelinerl.types import (
    MOST_SHOWN,
    ProblemSummary,
    PromptOrder,
    Rollout,
    RolloutGroup,
    Turn,
    Verdict,
    VersionSpan,
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One choice, the completion it came in, and what the verifier found."""

    completion: ChatCompletion
    choice: Choice
    verdict: Verdict


def assemble(order: PromptOrder, answers: Sequence[Answer], *, actor: str, refusal: str = "") -> RolloutGroup:
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
        problem=ProblemSummary(
            problem_id=order.problem.problem_id,
            tags=order.problem.tags,
            ground_truth=order.problem.ground_truth[:MOST_SHOWN],
        ),
        refusal=refusal,
    )


@final
class RolloutWriter:
    """Appends the groups of one actor; one writer at a time. `number` is that of its next group."""

    def __init__(self, stream: Stream, *, actor: str, number: int) -> None:
        self._stream = stream
        self._actor = actor
        self._name = ROLLOUTS + actor
        self.number = number

    @classmethod
    async def begin(cls, stream: Stream, *, actor: str) -> Self:
        """Write on after whatever an earlier life of the actor has written."""
        return cls(stream, actor=actor, number=fresh_number(await stream.last_id(ROLLOUTS + actor)))

    async def append(self, groups: Sequence[RolloutGroup]) -> None:
        """Append in order.

        Raises:
            FencedError: another actor of this name writes here.
        """
        payloads = [encode_group(group) for group in groups]
        first, self.number = self.number, self.number + len(groups)
        if await self._stream.append(self._name, payloads, first_id=first) < len(payloads):
            await self._check(first, payloads)

    async def _check(self, first: int, payloads: Sequence[bytes]) -> None:
        """Some lay there already: by us, when the answer to a first try was lost, or in place of ours."""
        ours = {f"{first + place}-0": payload for place, payload in enumerate(payloads)}
        last = await self._stream.last_id(self._name)
        entries = await self._stream.read({self._name: f"{first - 1}-0"}, count=len(ours), block_s=0)
        # Of ours, what the trainer has finished with may be gone. The last id stays.
        if last != f"{self.number - 1}-0" or any(ours.get(entry.entry_id) != entry.payload for entry in entries):
            raise FencedError(f"another actor is called {self._actor}; give each a --name of its own; this one stops")


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
