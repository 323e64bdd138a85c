"""Conversion of a finished request to the contract's response, as pure functions.

The text of a choice is its decoded tokens, without the end-of-turn token, cut before a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import Literal, Protocol, final

import numpy as np

from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import (
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from inference_contract.tools import FunctionCallDelta, ToolCallDelta, ToolDefinition
from pipelinerl.engines.batching.request_checks import offered_tools
from pipelinerl.engines.batching.sample_loop import SampledToken
from pipelinerl.engines.batching.sequence import Request, Sequence, TopTokens
from pipelinerl.models.tool_calls import ParsedAnswer
from pipelinerl.numerics.routed_experts import on_the_wire
from trainer_contract.types import Experts


class Decoder(Protocol):
    """Converter of token ids to text."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a sample; they have no text."""
        ...

    def decode(self, token_ids: Items[int]) -> str:
        """Return the text of `token_ids`."""
        ...

    def parse_answer(self, text: str, tools: Items[ToolDefinition], *, key: bytes) -> ParsedAnswer:
        """Return the content and the tool calls of an answer's text."""
        ...


def completion(chat: ChatCompletionRequest, request: Request, model: str, decoder: Decoder) -> ChatCompletion:
    """Return the whole response; its `model_version` is the newest version that sampled any of its tokens."""
    return ChatCompletion(
        id=request.request_id,
        created=int(time.time()),
        model=model,
        choices=[_choice(chat, sequence, decoder) for sequence in request.sequences],
        usage=usage(request),
        prompt_token_ids=request.prompt_token_ids if chat.return_token_ids else None,
        prompt_routed_experts=_prompt_routed(request),
        prompt_logprobs=request.prompt_logprobs,
        model_version=max(sequence.newest_version for sequence in request.sequences),
        epoch=request.epoch,
    )


def usage(request: Request) -> Usage:
    """Return the token counts of the request so far: of its prompt and of its samples."""
    prompt, sampled = len(request.prompt_token_ids), request.num_sampled_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


def _choice(chat: ChatCompletionRequest, sequence: Sequence, decoder: Decoder) -> Choice:
    returned, answer = chat.return_token_ids, _answer(chat, sequence, decoder)
    return Choice(
        index=sequence.index,
        message=AssistantMessage(content=answer.content, tool_calls=list(answer.calls) or None),
        finish_reason=_reason(sequence.finish_reason or FinishReason.ABORT, answer),
        logprobs=_logprobs(sequence.token_ids, sequence.logprobs, sequence.top, decoder) if chat.logprobs else None,
        token_ids=sequence.token_ids if returned else None,
        token_logprobs=sequence.logprobs if returned else None,
        version_spans=sequence.spans() if returned else None,
        routed_experts=_routed(sequence.routed, sequence.request),
    )


def _routed(rows: Items[Experts], request: Request) -> RoutedExperts | None:
    """Return the routing of new tokens, whose rows are [layers, top_k]; None unless the request asks for routing."""
    if not request.tells_routing or request.prompt_routed is None:
        return None
    return on_the_wire(np.stack(rows) if rows else request.prompt_routed[:0])


def _prompt_routed(request: Request) -> RoutedExperts | None:
    return None if request.prompt_routed is None else on_the_wire(request.prompt_routed)


def _answer(chat: ChatCompletionRequest, sequence: Sequence, decoder: Decoder) -> ParsedAnswer:
    """Return the whole text of a sample and, if tools are offered, the calls in this text.

    The ids of calls are a function of the sampled tokens and of the prompt's length.
    """
    text, tools = _text(sequence, decoder), offered_tools(chat)
    if not tools:
        return ParsedAnswer(text)
    token_ids = [len(sequence.request.prompt_token_ids), *sequence.prefix, *sequence.token_ids]
    return decoder.parse_answer(text, tools, key=np.asarray(token_ids, np.int64).tobytes())


def _reason(reason: FinishReason, answer: ParsedAnswer) -> FinishReason:
    return FinishReason.TOOL_CALLS if answer.calls and reason is FinishReason.STOP else reason


def _delta(answer: ParsedAnswer, *, role: Literal["assistant"] | None = None) -> Delta:
    """Return an answer as the delta of a chunk."""
    calls = [
        ToolCallDelta(
            index=place,
            id=call.id,
            type=call.type,
            function=FunctionCallDelta(name=call.function.name, arguments=call.function.arguments),
        )
        for place, call in enumerate(answer.calls)
    ]
    return Delta(role=role, content=answer.content or None, tool_calls=calls or None)


def _text(sequence: Sequence, decoder: Decoder) -> str:
    if sequence.text is not None:
        sequence.text.close()
        return sequence.text.text
    token_ids = sequence.prefix + sequence.token_ids
    if token_ids and token_ids[-1] in sequence.request.stop_ids:
        token_ids = token_ids[:-1]
    return decoder.decode(token_ids)


def _logprobs(token_ids: Items[int], logprobs: Items[float], top: Items[TopTokens], decoder: Decoder) -> ChoiceLogprobs:
    """Return OpenAI's log-prob records; `top` is empty if the request does not ask for top log-probs."""
    content = []
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        token = decoder.decode([token_id])
        likeliest = [_top_logprob(*pair, decoder) for pair in top[place]] if top else []
        content.append(TokenLogprob(token=token, logprob=logprob, bytes=list(token.encode()), top_logprobs=likeliest))
    return ChoiceLogprobs(content=content)


def _top_logprob(token_id: int, logprob: float, decoder: Decoder) -> TopLogprob:
    token = decoder.decode([token_id])
    return TopLogprob(token=token, logprob=logprob, bytes=list(token.encode()))


def first_chunk(chat: ChatCompletionRequest, request: Request, model: str, version: int) -> ChatCompletionChunk:
    """Return the chunk that opens a stream: the role of every choice, and the prompt's tokens."""
    choices = [
        ChunkChoice(index=sequence.index, delta=Delta(role="assistant", content="")) for sequence in request.sequences
    ]
    return _chunk(chat, request, model, version, choices, opens=True)


def chunk(
    chat: ChatCompletionRequest, request: Request, model: str, token: SampledToken, decoder: Decoder
) -> ChatCompletionChunk:
    """Return the chunk for one token of one choice."""
    token_ids = [] if token.token_id is None else [token.token_id]
    logprobs = [token.logprob] * len(token_ids)
    top = [] if token.top is None else [token.top]
    returned, reason = chat.return_token_ids, token.finish_reason
    delta = Delta(content=token.text or None)
    if offered_tools(chat):  # the text may turn out to be part of a call, so it is sent only at the end
        delta = Delta()
        if reason is not None:
            sequence = next(each for each in request.sequences if each.index == token.index)
            answer = _answer(chat, sequence, decoder)
            delta, reason = _delta(answer), _reason(reason, answer)
    choice = ChunkChoice(
        index=token.index,
        delta=delta,
        finish_reason=reason,
        logprobs=_logprobs(token_ids, logprobs, top, decoder) if chat.logprobs else None,
        token_ids=token_ids if returned else None,
        token_logprobs=logprobs if returned else None,
        version_spans=[(token.version, len(token_ids))] * len(token_ids) if returned else None,
        routed_experts=_routed([] if token.routed is None else [token.routed], request),
    )
    return _chunk(chat, request, model, token.version, [choice])


@final
class NewTokens:
    """Reader of the tokens that were sampled since the last `take`, while the loop's thread appends more.

    Text is sent only once per choice, when the choice ends.
    """

    def __init__(self, chat: ChatCompletionRequest, request: Request, model: str, decoder: Decoder) -> None:
        self.version = 0
        self._chat = chat
        self._request = request
        self._model = model
        self._decoder = decoder
        self._sent = [0] * len(request.sequences)
        self._ended = [False] * len(request.sequences)
        self._opened = False

    def take(self, *, all_of_it: bool) -> ChatCompletionChunk | None:
        """Return the next chunk, or None if there are no new tokens.

        Args:
            all_of_it: the request has ended, so all remaining tokens are returned.
        """
        choices = []
        for place, sequence in enumerate(self._request.sequences):
            start, (reason, end) = self._sent[place], sequence.certain()
            if all_of_it:
                end = len(sequence.token_ids)
            if end == start and (reason is None or self._ended[place]):
                continue
            self._sent[place], self._ended[place] = end, reason is not None
            self.version = max(self.version, sequence.newest_version)
            choices.append(self._part(sequence, start, end, reason))
        if not choices:
            return None
        opens, self._opened = not self._opened, True
        return _chunk(self._chat, self._request, self._model, self.version, choices, opens=opens)

    def _part(self, sequence: Sequence, start: int, end: int, reason: FinishReason | None) -> ChunkChoice:
        token_ids, logprobs = sequence.token_ids[start:end], sequence.logprobs[start:end]
        returned = self._chat.return_token_ids
        role: Literal["assistant"] | None = "assistant" if start == 0 else None
        delta = Delta(role=role)
        if reason is not None:
            answer = _answer(self._chat, sequence, self._decoder)
            delta, reason = _delta(answer, role=role), _reason(reason, answer)
        return ChunkChoice.model_construct(  # skip validation, which is slow here; the values are trusted
            index=sequence.index,
            delta=delta,
            finish_reason=reason,
            logprobs=_logprobs(token_ids, logprobs, sequence.top[start:end], self._decoder)
            if self._chat.logprobs
            else None,
            token_ids=token_ids if returned else None,
            token_logprobs=logprobs if returned else None,
            version_spans=sequence.spans(start, end) if returned else None,
            routed_experts=_routed(sequence.routed[start:end], self._request),
        )


def usage_chunk(chat: ChatCompletionRequest, request: Request, model: str, version: int) -> ChatCompletionChunk:
    """Return the chunk that ends a stream whose `stream_options` ask for usage."""
    return _chunk(chat, request, model, version, [], used=usage(request))


def _chunk(
    chat: ChatCompletionRequest,
    request: Request,
    model: str,
    version: int,
    choices: list[ChunkChoice],
    *,
    used: Usage | None = None,
    opens: bool = False,
) -> ChatCompletionChunk:
    return ChatCompletionChunk(
        id=request.request_id,
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=used,
        prompt_token_ids=request.prompt_token_ids if opens and chat.return_token_ids else None,
        prompt_routed_experts=_prompt_routed(request) if opens else None,
        model_version=version,
        epoch=request.epoch,
    )
