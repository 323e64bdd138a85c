"""Types of `/v1/completions`, OpenAI's older route for prompts without a chat template.

Each prompt becomes one `ChatCompletionRequest`; fields that `CompletionRequest` does not list mean the same as on
`/v1/chat/completions`.
"""

from __future__ import annotations

import codecs
import itertools
from collections.abc import Sequence
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from inference_contract.schemas import (
    MOST_SAMPLES,
    MOST_TOP_LOGPROBS,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    FinishReason,
    Span,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from inference_contract.wire import Wire

_PROMPTS: Final = "must be a text, a list of texts, token ids, or a list of token ids; none of them empty"


class CompletionRequest(BaseModel):
    """OpenAI's completion request; fields that are not listed here are those of `ChatCompletionRequest`.

    `logprobs` is the number of likeliest tokens to report per sampled token. A text prompt that spells out a control
    token is tokenised as plain text; send token ids to use control tokens. Fields for chats only (`messages`, `tools`,
    …) must be null.
    """

    model_config = ConfigDict(frozen=True, extra="allow", protected_namespaces=())

    prompt: list[str | list[int]]
    max_tokens: int | None = Field(default=16, ge=1)
    logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    stream: bool = False
    suffix: Literal["", None] = None
    best_of: Literal[1, None] = None
    messages: None = None
    tools: None = None
    prefixes: None = None
    prompt_token_ids: None = None
    top_logprobs: None = None
    max_completion_tokens: None = None

    @field_validator("prompt", mode="before")
    @classmethod
    def _prompts(cls, value: Any) -> list[Any]:
        prompts = [value] if isinstance(value, str) or _are_ids(value) else value
        if not isinstance(prompts, list) or not all(
            _are_ids(each) or (each and isinstance(each, str)) for each in prompts
        ):
            raise ValueError(_PROMPTS)
        if not 0 < len(prompts) <= MOST_SAMPLES:
            raise ValueError(f"must be 1 to {MOST_SAMPLES} prompts, got {len(prompts)}")
        return prompts

    @field_validator("stream")
    @classmethod
    def _streams_one(cls, stream: bool, info: Any) -> bool:
        if stream and len(info.data.get("prompt", ())) > 1:
            raise ValueError("one prompt is streamed at a time; send a request for each")
        return stream

    def chats(self) -> list[ChatCompletionRequest]:
        """Return one chat request per prompt. Raises `pydantic.ValidationError` if a field is invalid."""
        fields: dict[str, Any] = {"max_tokens": self.max_tokens, "stream": self.stream} | (self.model_extra or {})
        if self.logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": self.logprobs}
        return [
            ChatCompletionRequest.model_validate(
                fields | ({"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt})
            )
            for prompt in self.prompt
        ]


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


class TextLogprobs(Wire):
    """OpenAI's older form of log-probs: each field is a list with one entry per token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(Wire):
    """One sample; sample i of prompt p has the index p * n + i."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    logprobs: TextLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    version_spans: list[Span] | None = None


class TextCompletion(Wire):
    """The complete answer, or one server-sent event of a streamed answer."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None = None
    model_version: int
    epoch: int = 0


def whole_text(answers: Sequence[ChatCompletion]) -> TextCompletion:
    """Merge the chat answers to a request's prompts, in order, into one answer of `/v1/completions`."""
    first, n = answers[0], len(answers[0].choices)
    return TextCompletion(
        id=first.id,
        created=first.created,
        model=first.model,
        choices=[
            _text_choice(choice, choice.message.content, index=place * n + choice.index, prompt=answer.prompt_token_ids)
            for place, answer in enumerate(answers)
            for choice in answer.choices
        ],
        usage=Usage(
            prompt_tokens=sum(answer.usage.prompt_tokens for answer in answers),
            completion_tokens=sum(answer.usage.completion_tokens for answer in answers),
            total_tokens=sum(answer.usage.total_tokens for answer in answers),
        ),
        model_version=max(answer.model_version for answer in answers),
        epoch=first.epoch,
    )


def part_of_text(chunk: ChatCompletionChunk) -> TextCompletion:
    """Convert one chunk of a streamed chat answer to a chunk of `/v1/completions`; a stream answers only one prompt."""
    return TextCompletion(
        id=chunk.id,
        created=chunk.created,
        model=chunk.model,
        choices=[
            _text_choice(part, part.delta.content or "", index=part.index, prompt=chunk.prompt_token_ids)
            for part in chunk.choices
        ],
        usage=chunk.usage,
        model_version=chunk.model_version,
        epoch=chunk.epoch,
    )


def _text_choice(part: Choice | ChunkChoice, text: str, *, index: int, prompt: list[int] | None) -> TextChoice:
    return TextChoice(
        index=index,
        text=text,
        finish_reason=part.finish_reason,
        logprobs=None if part.logprobs is None else _columns(part.logprobs),
        prompt_token_ids=prompt,
        token_ids=part.token_ids,
        token_logprobs=part.token_logprobs,
        version_spans=part.version_spans,
    )


def _columns(logprobs: ChoiceLogprobs) -> TextLogprobs:
    records, decoder = logprobs.content, codecs.getincrementaldecoder("utf-8")("replace")
    lengths = [len(record.token if record.bytes is None else decoder.decode(bytes(record.bytes))) for record in records]
    return TextLogprobs(
        tokens=[_spelled(record) for record in records],
        token_logprobs=[record.logprob for record in records],
        top_logprobs=[{_spelled(each): each.logprob for each in record.top_logprobs} for record in records],
        text_offset=[0, *itertools.accumulate(lengths)][: len(records)],
    )


def _spelled(record: TokenLogprob | TopLogprob) -> str:
    r"""Return a token's text, or as OpenAI does for part of a character, its bytes: `bytes:\xe2\x82`."""
    if record.bytes is None or record.token.encode() == bytes(record.bytes):
        return record.token
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in record.bytes)
