"""From a finished request to the contract's answer: pure functions.

The text of a choice is its tokens decoded, without the end-of-turn token, cut before a stop string.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import Protocol

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
    Usage,
)
from pipelinerl.engines.batching.delivery import SampledToken
from pipelinerl.engines.batching.sequence import Request, Sequence


class Decoder(Protocol):
    """Token ids to text."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Tokens that end a sample; they have no text."""
        ...

    def decode(self, token_ids: Items[int]) -> str:
        """The text of `token_ids`."""
        ...


def completion(asked: ChatCompletionRequest, request: Request, model: str, decoder: Decoder) -> ChatCompletion:
    """The whole answer; `model_version` is the newest weights that sampled any of it."""
    return ChatCompletion(
        id=request.request_id,
        created=int(time.time()),
        model=model,
        choices=[_choice(asked, sequence, decoder) for sequence in request.sequences],
        usage=usage(request),
        prompt_token_ids=request.prompt_token_ids if asked.return_token_ids else None,
        model_version=max(sequence.newest_version for sequence in request.sequences),
        epoch=request.epoch,
    )


def usage(request: Request) -> Usage:
    """Tokens so far."""
    prompt, sampled = len(request.prompt_token_ids), request.num_sampled_tokens
    return Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


def _choice(asked: ChatCompletionRequest, sequence: Sequence, decoder: Decoder) -> Choice:
    returned = asked.return_token_ids
    return Choice(
        index=sequence.index,
        message=AssistantMessage(content=_text(sequence, decoder)),
        finish_reason=sequence.finish_reason or FinishReason.ABORT,
        logprobs=_logprobs(sequence.token_ids, sequence.logprobs, decoder) if asked.logprobs else None,
        token_ids=sequence.token_ids if returned else None,
        token_logprobs=sequence.logprobs if returned else None,
        version_spans=sequence.spans() if returned else None,
    )


def _text(sequence: Sequence, decoder: Decoder) -> str:
    if sequence.text is not None:
        sequence.text.close()
        return sequence.text.text
    token_ids = sequence.token_ids
    if token_ids and token_ids[-1] in decoder.eos_token_ids:
        token_ids = token_ids[:-1]
    return decoder.decode(token_ids)


def _logprobs(token_ids: Items[int], logprobs: Items[float], decoder: Decoder) -> ChoiceLogprobs:
    content = []
    for token_id, logprob in zip(token_ids, logprobs, strict=True):
        token = decoder.decode([token_id])
        content.append(TokenLogprob(token=token, logprob=logprob, bytes=list(token.encode())))
    return ChoiceLogprobs(content=content)


def first_chunk(asked: ChatCompletionRequest, request: Request, model: str, version: int) -> ChatCompletionChunk:
    """Opens a stream: the role of every choice, and the prompt's tokens."""
    choices = [
        ChunkChoice(index=sequence.index, delta=Delta(role="assistant", content="")) for sequence in request.sequences
    ]
    return _chunk(asked, request, model, version, choices)


def chunk(
    asked: ChatCompletionRequest, request: Request, model: str, token: SampledToken, decoder: Decoder
) -> ChatCompletionChunk:
    """What one step added to one choice."""
    token_ids = [] if token.token_id is None else [token.token_id]
    logprobs = [token.logprob] * len(token_ids)
    returned = asked.return_token_ids
    choice = ChunkChoice(
        index=token.index,
        delta=Delta(content=token.text or None),
        finish_reason=token.finish_reason,
        logprobs=_logprobs(token_ids, logprobs, decoder) if asked.logprobs else None,
        token_ids=token_ids if returned else None,
        token_logprobs=logprobs if returned else None,
        version_spans=[(token.version, len(token_ids))] * len(token_ids) if returned else None,
    )
    return _chunk(asked, request, model, token.version, [choice])


def usage_chunk(asked: ChatCompletionRequest, request: Request, model: str, version: int) -> ChatCompletionChunk:
    """Ends a stream whose `stream_options` ask for usage."""
    return _chunk(asked, request, model, version, [], usage(request))


def _chunk(
    asked: ChatCompletionRequest,
    request: Request,
    model: str,
    version: int,
    choices: list[ChunkChoice],
    used: Usage | None = None,
) -> ChatCompletionChunk:
    opens = asked.return_token_ids and any(choice.delta.role is not None for choice in choices)
    return ChatCompletionChunk(
        id=request.request_id,
        created=int(time.time()),
        model=model,
        choices=choices,
        usage=used,
        prompt_token_ids=request.prompt_token_ids if opens else None,
        model_version=version,
        epoch=request.epoch,
    )
