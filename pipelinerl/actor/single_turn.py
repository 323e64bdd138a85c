"""Groups of single answers: all samples of an order are one request, so an engine computes the prompt once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from inference_contract.schemas import ChatCompletion, ChatCompletionRequest, ChatMessage, Choice
from pipelinerl.actor.group_maker import GroupProgress, MadeRollout, Sampler
from pipelinerl.actor.rollouts import Answer, rollouts_of
from pipelinerl.enums import RoutingReplay
from pipelinerl.errors import PipelineError
from pipelinerl.types import Priority, PromptOrder, Purpose
from pipelinerl.verifiers.verdicts import judged
from pipelinerl.verifiers.verifier import GroupVerifier, SampledAnswer


class SingleTurn:
    """`GroupMaker` for domains without an environment; requests samples that updates abort, up to `attempts` times."""

    def __init__(
        self,
        sampler: Sampler,
        verifier_of: Callable[[str], GroupVerifier],
        *,
        attempts: int,
        routing_replay: RoutingReplay = RoutingReplay.OFF,
    ) -> None:
        self._sampler = sampler
        self._verifier_of = verifier_of
        self._attempts = attempts
        self._replay = routing_replay

    async def make(self, order: PromptOrder, progress: GroupProgress) -> Sequence[MadeRollout]:
        """Return G verified answers; answers that a weight update aborted are sampled again."""
        verifier = self._verifier_of(order.problem.domain)
        sampled: list[tuple[ChatCompletion, Choice]] = []
        for attempt in range(self._attempts):
            request = chat_request(order, here=len(sampled), attempt=attempt, replay=self._replay)
            answered = await self._sampler.complete(request, begun=progress.begin, engine=order.engine)
            progress.hand_over(answered)
            choices = answered.completion.choices
            sampled += [(answered.completion, choice) for choice in choices if choice.finish_reason != "abort"]
            if len(sampled) == order.sampling.num_samples:
                break
            progress.resampled += order.sampling.num_samples - len(sampled)
        else:
            raise PipelineError(
                f"{order.order_id}: weight updates aborted its samples in each of {self._attempts} attempts; "
                "raise j, or use on_update = continue"
            )
        progress.end_sampling(answered.url)
        answers = [
            SampledAnswer(choice.message.content, choice.token_ids or (), choice.finish_reason.value)
            for _, choice in sampled
        ]
        judgements = await judged(verifier, order.problem, answers)
        progress.judgements, progress.spans = judgements, [choice.version_spans or () for _, choice in sampled]
        verified = [
            Answer(completion, choice, judgement.verdict)
            for (completion, choice), judgement in zip(sampled, judgements, strict=True)
        ]
        replay = self._replay if order.purpose is Purpose.TRAINING else RoutingReplay.OFF
        return rollouts_of(order, verified, replay=replay)


def chat_request(
    order: PromptOrder, *, here: int = 0, attempt: int = 0, replay: RoutingReplay = RoutingReplay.OFF
) -> ChatCompletionRequest:
    """Return the request for an order's missing samples: `here` samples exist already; `attempt` changes the seed."""
    sampling = order.sampling
    return ChatCompletionRequest(
        messages=[ChatMessage.model_construct(role=m.role, content=m.content) for m in order.problem.messages],
        n=sampling.num_samples - here,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        max_tokens=sampling.max_tokens,
        stop=list(sampling.stop) or None,
        seed=(order.seed + attempt) % 2**63,
        return_token_ids=True,
        policy_logprobs=order.needs_policy_logprobs,
        return_routed_experts=replay is RoutingReplay.ROLLOUT and order.purpose is Purpose.TRAINING,
        priority=Priority.TRAINING if order.purpose is Purpose.TRAINING else Priority.EVALUATION,
        chat_template_kwargs=dict(order.chat_template_kwargs),
    )
