"""A trial episode of a domain for `pipelinerl check`, with the recipe's tokenizer and a scripted model.

The model's first answer is empty, or a call of the `python` tool. Each further answer is the problem's reference
answer. The output shows the exact tokens that the model would see, turn by turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import final

from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    Choice,
    FinishReason,
    Usage,
)
from pipelinerl.actor.episodes import Episodes, PlayedEpisode
from pipelinerl.actor.group_maker import Unwatched
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.environments.gateway import Gateway
from pipelinerl.errors import RecipeError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.models.tool_calls import ParsedAnswer, written
from pipelinerl.roles.episodes import open_episodes
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Answered, Problem, PromptOrder, Purpose, Sampling


async def episode_tried(
    config: RunConfig, domain: DomainSection, problem: Problem, tokenizer: ChatTokenizer
) -> list[tuple[str, str]]:
    """Play an episode; return (kind of finding, line) for each turn, for the verdict, and for an episode too long.

    Raises:
        RecipeError: the environment fails (the message has the file and the line), or it offers tools, but the chat
            template cannot write tool calls.
    """
    first = _first_call(domain, tokenizer) if domain.episode.tools else ""
    answerer = ScriptedAnswers(tokenizer, [first, *[problem.ground_truth] * 1000])
    verifiers = {domain.name: open_verifier(domain)} if domain.has_verifier else {}
    alone = config.model_copy(update={"domains": (domain,)})
    domains, gateway = open_episodes(alone, verifiers), Gateway()
    episodes = Episodes(gateway, answerer, domains, attempts=1)
    order = PromptOrder(
        order_id="check",
        index=0,
        purpose=Purpose.EVALUATION,
        problem=problem,
        sampling=Sampling(num_samples=1, max_tokens=domain.max_tokens or config.sampling.max_tokens),
        seed=config.run.seed,
        chat_template_kwargs=domain.chat_template_kwargs,
    )
    try:
        async with gateway.serve():
            await domains[domain.name].start()
            played = await episodes.play(order, 0, Unwatched())
    finally:
        for each in domains.values():
            await each.close()
    verdict = played.judgement.verdict
    if not verdict.outcome.is_judgement:
        raise RecipeError(f"domains.{domain.name}: a trial episode failed: {verdict.reason}")
    if played.episode.last is None:
        raise RecipeError(
            f"domains.{domain.name}: a trial episode never asked the model for an answer; call client.chat"
        )
    lines = [
        ("episode", f"domains.{domain.name}: {line}")
        for line in (*_turns(played, tokenizer), _verdict(played, answerer.seconds))
    ]
    return [*lines, *(("warning", line) for line in _too_long(config, domain, played))]


def _first_call(domain: DomainSection, tokenizer: ChatTokenizer) -> str:
    if tokenizer.call_format is None:
        raise RecipeError(
            f"domains.{domain.name}.episode.tools: the model's chat template must write calls in a format that is "
            "parsed (Hermes, Qwen3-Coder, Llama 3); choose such a model, or leave tools out"
        )
    return written(tokenizer.call_format, "python", {"code": "print(6 * 7)"})


def _turns(played: PlayedEpisode, tokenizer: ChatTokenizer) -> Iterator[str]:
    rollout = played.episode.rollout(played.judgement.verdict, temperature=1.0)
    for number, turn in enumerate(rollout.turns, 1):
        context, sampled = turn.context_token_ids, turn.token_ids
        begins = f", a new segment ({turn.begins})" if turn.begins and number > 1 else ""
        yield (
            f"turn {number}{begins}: {len(context)} tokens of context, {len(sampled)} that train: "
            f"{tokenizer.decode(context.tolist())!r} ▸ {tokenizer.decode(sampled.tolist())!r}"
        )


def _too_long(config: RunConfig, domain: DomainSection, played: PlayedEpisode) -> Iterator[str]:
    """Yield a warning if `max_turns` turns with full answers and contexts like these do not fit into the context."""
    turns, most = [each.turn for each in played.episode.turns], domain.episode.max_turns
    answer = domain.episode.turn_tokens or domain.max_tokens or config.sampling.max_tokens
    later = [len(turn.context_token_ids) for turn in turns[1:]]
    longest = len(turns[0].context_token_ids) + most * answer + (most - 1) * max(later, default=0)
    if later and longest > config.engine.context_length:
        yield (
            f"domains.{domain.name}: an episode of {most} such turns with answers of {answer} tokens may reach "
            f"{longest:,} tokens and ends at {config.engine.context_length:,}; raise engine.context_length, or lower "
            "episode.max_turns or episode.turn_tokens"
        )


def _verdict(played: PlayedEpisode, answering_s: float) -> str:
    verdict, seconds = played.judgement
    own_s = max(0.0, seconds - answering_s)
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"{verdict.outcome}, reward {verdict.reward:g}{reason}; {own_s:.2f} s in the environment"


@final
class ScriptedAnswers:
    """`Sampler` that returns the given answers in order; `seconds` is the total time spent in it."""

    def __init__(self, tokenizer: ChatTokenizer, texts: Iterable[str]) -> None:
        self.seconds = 0.0
        self._tokenizer = tokenizer
        self._texts = iter(texts)

    async def complete(
        self, request: ChatCompletionRequest, *, begun: Callable[[], None], engine: str = "", near: str = ""
    ) -> Answered:
        """Return the next scripted answer."""
        began = time.monotonic()
        messages, tools = request.messages or [], request.tools or ()
        kwargs, known = request.chat_template_kwargs, request.continue_token_ids
        if known and request.continue_from:
            prompt = self._tokenizer.encode_continuation(messages, request.continue_from, known, kwargs, tools)
        else:
            prompt = self._tokenizer.encode_chat(messages, kwargs, tools)
        text = next(self._texts)
        sampled = [*self._tokenizer.encode(text), min(self._tokenizer.eos_token_ids)]
        answer = self._tokenizer.parse_answer(text, tools, key=b"check") if tools else ParsedAnswer(text)
        choice = Choice(
            index=0,
            message=AssistantMessage(content=answer.content, tool_calls=list(answer.calls) or None),
            finish_reason=FinishReason.TOOL_CALLS if answer.calls else FinishReason.STOP,
            token_ids=sampled,
            token_logprobs=[0.0] * len(sampled),
            version_spans=[(0, len(sampled))],
        )
        usage = Usage(
            prompt_tokens=len(prompt), completion_tokens=len(sampled), total_tokens=len(prompt) + len(sampled)
        )
        self.seconds += time.monotonic() - began
        return Answered(
            ChatCompletion(
                id="check",
                created=0,
                model="check",
                choices=[choice],
                usage=usage,
                prompt_token_ids=prompt,
                model_version=0,
            ),
            url="",
        )
