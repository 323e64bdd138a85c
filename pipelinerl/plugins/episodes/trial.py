"""The trial episode of `pipelinerl check`, which a scripted model plays.

The scripted model first answers with nothing, or with a call of the `python` tool, and then with the reference answer.
The output shows the exact tokens that the model would see, turn by turn.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionRequest,
    Choice,
    FinishReason,
    Usage,
)
from pipelinerl.actor.group_maker import GroupProgress
from pipelinerl.answers.tool_calls import ParsedAnswer
from pipelinerl.commands.findings.trials import reference_answer
from pipelinerl.config.domains import DomainSection
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError, UnshownFieldError
from pipelinerl.models.tokenizer import ChatTokenizer
from pipelinerl.plugins.episodes.group import PlayedEpisode
from pipelinerl.plugins.episodes.opening import open_episodes
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Answered, Problem, PromptOrder, Purpose, Sampling


async def episode_tried(
    config: RunConfig, domain: DomainSection, problem: Problem, tokenizer: ChatTokenizer
) -> list[tuple[str, str]]:
    """Play an episode; return pairs (kind of finding, line): its turns, its verdict, a warning if it may get too long.

    Raises:
        RecipeError: the environment fails (the message has the file and the line), or it offers tools whose calls the
            chat template cannot render.
    """
    first = ""
    if domain.episode.tools:
        try:
            first = tokenizer.written_call("python", {"code": "print(6 * 7)"})
        except UnshownFieldError as error:
            raise RecipeError(f"domains.{domain.name}.episode.{error}") from error
    answerer = ScriptedAnswers(tokenizer, [first, *[reference_answer(domain, problem)] * 1000])
    verifiers = {domain.name: open_verifier(domain)} if domain.has_verifier else {}
    alone = config.model_copy(update={"domains": (domain,)})
    episodes = open_episodes(alone, answerer, verifiers)
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
        async with episodes.serve():
            await episodes.start()
            played = await episodes.play(order, 0, GroupProgress())
    finally:
        await episodes.close()
        for verifier in verifiers.values():
            await verifier.close()
    verdict = played.judgement.verdict
    if not verdict.outcome.is_judgement:
        raise RecipeError(f"domains.{domain.name}: a trial episode failed: {verdict.reason}")
    own_s = max(0.0, played.judgement.seconds - answerer.seconds)
    reason = f" ({verdict.reason})" if verdict.reason else ""
    judged = f"{verdict.outcome}, reward {verdict.reward:g}{reason}; {own_s:.2f} s in the environment"
    lines = [("episode", f"domains.{domain.name}: {line}") for line in (*_turns(played, tokenizer), judged)]
    return [*lines, *(("warning", line) for line in _too_long(config, domain, played, answerer.longest))]


def _turns(played: PlayedEpisode, tokenizer: ChatTokenizer) -> Iterator[str]:
    rollout = played.episode.rollout(played.judgement.verdict, temperature=1.0)
    for number, turn in enumerate(rollout.turns, 1):
        context, sampled = turn.context_token_ids, turn.token_ids
        begins = f", a new segment ({turn.begins})" if turn.begins and number > 1 else ""
        yield (
            f"turn {number}{begins}: {len(context)} tokens of context, {len(sampled)} that train: "
            f"{tokenizer.decode(context.tolist())!r} ▸ {tokenizer.decode(sampled.tolist())!r}"
        )


def _too_long(config: RunConfig, domain: DomainSection, played: PlayedEpisode, most_sent: int) -> Iterator[str]:
    if most_sent >= config.engine.context_length:
        yield (
            f"domains.{domain.name}: a request of this episode has {most_sent:,} tokens, and a run refuses it, because "
            f"engine.context_length is {config.engine.context_length:,}; raise it, or shorten the messages"
        )
        return
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


class ScriptedAnswers:
    """`Sampler` that returns the given answers in order.

    `seconds` is the total time that its calls have taken, and `longest` the number of tokens of the longest request.
    """

    def __init__(self, tokenizer: ChatTokenizer, texts: Iterable[str]) -> None:
        self.seconds, self.longest = 0.0, 0
        self._tokenizer = tokenizer
        self._texts = iter(texts)

    async def complete(
        self,
        request: ChatCompletionRequest,
        *,
        begun: Callable[[], None],
        engine: str = "",
        near: str = "",
        on_text: Callable[[str], None] | None = None,
    ) -> Answered:
        began = time.monotonic()
        messages, tools = request.messages or [], request.tools or ()
        kwargs, known = request.chat_template_kwargs, request.continue_token_ids
        if known and request.continue_from:
            prompt = self._tokenizer.encode_continuation(messages, request.continue_from, known, kwargs, tools)
        else:
            prompt = self._tokenizer.encode_chat(messages, kwargs, tools)
        self.longest = max(self.longest, len(prompt))
        text = next(self._texts)
        sampled = [*self._tokenizer.encode(text), min(self._tokenizer.eos_token_ids)]
        answer = ParsedAnswer(text)
        if tools:
            answer = self._tokenizer.parse_answer(text, tools, prompt_token_ids=prompt, key=b"check")
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
