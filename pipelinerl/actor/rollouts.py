"""Conversion of engines' answers to a `RolloutGroup`, or to readable text for held-out problems; and `RolloutWriter`.

Users who look at a held-out problem see the text that the verifier judged, cut to a bounded length.

`RolloutWriter` appends groups to the actor's partition. It chooses the entry ids, so a repeated append is a no-op, and
a group whose `append` returned is in the partition exactly once. Ids start from the clock: if two actors have the same
name, the one that started earlier finds higher ids in its partition, and exits.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from inference_contract.schemas import ChatCompletion, Choice
from pipelinerl.actor.group_maker import MadeRollout
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import FencedError, RecordError
from pipelinerl.messages import ROLLOUTS, ShownAnswer, ShownProblem
from pipelinerl.numerics.routed_experts import of_context, off_the_wire
from pipelinerl.observability.samples import MOST_CHARACTERS, shortened
from pipelinerl.streams.stream import Stream, fresh_number
from pipelinerl.types import MOST_SHOWN, ProblemSummary, PromptOrder, Rollout, RolloutGroup, Turn, Verdict, VersionSpan
from trainer_contract.types import Experts

#: Maximum number of answers to one problem that are shown to readers.
_MOST_ANSWERS: Final = 16


@dataclass(frozen=True, slots=True)
class Answer:
    """One sampled answer: the choice, the completion that contains it, and the verifier's verdict."""

    completion: ChatCompletion
    choice: Choice
    verdict: Verdict


def rollouts_of(
    order: PromptOrder, answers: Sequence[Answer], *, replay: RoutingReplay = RoutingReplay.OFF
) -> list[MadeRollout]:
    """Return the single-turn rollouts of verified answers; `RecordError` if the engine left out what training needs."""
    routed_prompts = _routed_prompts(order, answers) if replay is RoutingReplay.ROLLOUT else {}
    return [
        MadeRollout(_rollout(order, each, routed_prompts.get(id(each.completion))), each.choice.message.content)
        for each in answers
    ]


def assemble(
    order: PromptOrder, made: Sequence[MadeRollout], *, actor: str, refusal: str = "", engines: Collection[str] = ()
) -> RolloutGroup:
    """Return the group of an order from its rollouts; `refusal` is the reason if the group filter refused the group."""
    return RolloutGroup(
        group_id=order.order_id,
        index=order.index,
        domain=order.problem.domain,
        actor=actor,
        rollouts=tuple(each.rollout for each in made),
        problem=ProblemSummary(
            problem_id=order.problem.problem_id,
            tags=order.problem.tags,
            ground_truth=order.problem.ground_truth[:MOST_SHOWN],
        ),
        refusal=refusal,
        issued_at=order.issued_at,
        engines=tuple(sorted(engines)),
    )


class RolloutWriter:
    """The only active writer of one actor's groups. `number` is the number of the next group."""

    def __init__(self, stream: Stream, *, actor: str, number: int) -> None:
        self._stream = stream
        self._actor = actor
        self._name = ROLLOUTS + actor
        self.number = number

    @classmethod
    async def begin(cls, stream: Stream, *, actor: str) -> Self:
        """Return a writer whose entry ids follow those that earlier starts of this actor left in the partition."""
        return cls(stream, actor=actor, number=fresh_number(await stream.last_id(ROLLOUTS + actor)))

    async def append(self, payloads: Sequence[bytes]) -> None:
        """Append encoded groups in order. Raises `FencedError` if another actor of this name writes here."""
        first, self.number = self.number, self.number + len(payloads)
        if await self._stream.append(self._name, payloads, first_id=first) == len(payloads):
            return
        # If the entries from `first` on are these payloads, an earlier attempt of this actor appended them, and only
        # the reply was lost. Some may be missing, because the trainer has trimmed them. Trimming keeps the last id.
        ours = {f"{first + place}-0": payload for place, payload in enumerate(payloads)}
        last = await self._stream.last_id(self._name)
        entries = await self._stream.read({self._name: f"{first - 1}-0"}, count=len(ours), block_s=0)
        if last != f"{self.number - 1}-0" or any(ours.get(entry.entry_id) != entry.payload for entry in entries):
            raise FencedError(f"another actor is called {self._actor}; give each a --name of its own; this one stops")


def _routed_prompts(order: PromptOrder, answers: Sequence[Answer]) -> dict[int, Experts]:
    """Return the experts of prompts by the `id()` of their completions; `RecordError` if they do not fit."""
    found: dict[int, Experts] = {}
    for completion, choice in ((answer.completion, answer.choice) for answer in answers):
        prompt, experts = completion.prompt_token_ids or [], completion.prompt_routed_experts
        if experts is None or choice.routed_experts is None:
            raise RecordError(
                f"{order.order_id}: the engine must answer with routed_experts and prompt_routed_experts when "
                'return_routed_experts is set; trainer.routing_replay = "rollout" needs an engine that tells them'
            )
        if not experts.is_like(choice.routed_experts) or experts.num_tokens != len(prompt) - 1:
            raise RecordError(
                f"{order.order_id}: expected routed experts of {len(prompt) - 1} prompt tokens, like those of the "
                f"answer, {choice.routed_experts.shape}, got {experts.shape}"
            )
        if id(completion) not in found:
            found[id(completion)] = of_context(experts)
    return found


def _rollout(order: PromptOrder, answer: Answer, routed_prompt: Experts | None) -> Rollout:
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
    routed = choice.routed_experts if routed_prompt is not None else None
    if routed is not None and routed.num_tokens != tokens:
        raise RecordError(f"{order.order_id}: expected routed experts of {tokens} tokens, got {routed.num_tokens}")
    turn = Turn(
        context_token_ids=np.array(prompt, np.int32),
        token_ids=np.array(choice.token_ids, np.int32),
        behavior_logprobs=np.array(choice.token_logprobs, np.float32),
        spans=tuple(VersionSpan(*span) for span in choice.version_spans),
        routed_experts=None if routed is None else off_the_wire(routed),
        context_routed_experts=routed_prompt,
    )
    return Rollout(
        turns=(turn,),
        verdict=answer.verdict,
        finish_reason=choice.finish_reason.value,
        temperature=order.sampling.temperature or 1.0,
        epoch=answer.completion.epoch,
    )


def shown_problem(order: PromptOrder, made: Sequence[MadeRollout]) -> ShownProblem:
    """Return the problem of an order with its first answers, as users see them in `pipelinerl samples`."""
    prompt = "\n".join(f"{message.role}: {message.content}" for message in order.problem.messages)
    answers = [(each.text, each.rollout, each.rollout.verdict) for each in made[:_MOST_ANSWERS]]
    return ShownProblem(
        problem_id=order.problem.problem_id,
        prompt=shortened(prompt, MOST_CHARACTERS),
        ground_truth=order.problem.ground_truth[:MOST_SHOWN],
        answers=[
            ShownAnswer(
                text=shortened(text, MOST_CHARACTERS),
                outcome=verdict.outcome.value,
                reward=verdict.reward if math.isfinite(verdict.reward) else 0.0,
                reason=shortened(verdict.reason, MOST_SHOWN),
                finish_reason=rollout.finish_reason,
                num_tokens=rollout.num_sampled_tokens,
                spans=[(span.model_version, span.num_tokens) for turn in rollout.turns for span in turn.spans],
            )
            for text, rollout, verdict in answers
        ],
    )
