"""Wire types of chat completions and of engine state; `weights` has those of weight updates.

All types are immutable and validated. A field that an engine would ignore is dropped if its value would not change the
answer (`without_idle`), and otherwise rejected by name. Times are in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from inference_contract.routed_experts import RoutedExperts
from inference_contract.tools import ResponseFormat, ToolCall, ToolCallDelta, ToolDefinition
from inference_contract.weights import DType, WeightLayout
from inference_contract.wire import IN_MESSAGE, IN_REQUEST, IN_STREAM, TAGS, Wire


def without_idle(fields: Any, known: Container[str], idle: Mapping[str, tuple[Any, ...]]) -> Any:
    """Return `fields` without those that change nothing: null or `idle` ones, and in a request OpenAI's `TAGS`."""
    if not isinstance(fields, dict):
        return fields
    return {
        name: value
        for name, value in fields.items()
        if not (name in TAGS and idle is IN_REQUEST)
        and not (value is None and (name in known or name in idle))
        and not (name in idle and value in idle[name])
    }


# --- chat completions --------------------------------------------------------------------------------------------

#: Bounds within which sampling in float32 and counts in int32 are safe. A temperature of 0, greedy sampling, is allowed
#: too.
LEAST_TEMPERATURE: Final = 1e-5
LEAST_TOP_P: Final = 1e-6
MOST_TOP_K: Final = 2**31 - 1
#: The most samples of one request.
MOST_SAMPLES: Final = 1024
#: The largest absolute value of `priority`.
MOST_PRIORITY: Final = 2**31 - 1
#: Limits of one request: offered tools, tokens with a bias, and likeliest tokens reported per sampled token.
MOST_TOOLS: Final = 1024
MOST_BIASED_TOKENS: Final = 1024
MOST_TOP_LOGPROBS: Final = 20
#: The largest absolute value of a token's bias, and of a presence or frequency penalty.
MOST_BIAS: Final = 100.0
MOST_PENALTY: Final = 2.0


class ChatMessage(Wire):
    """One message of a conversation.

    A `content` that is a list of text parts, OpenAI's other form, is joined with newlines. An assistant's `content` may
    be null if it has `tool_calls`, and then becomes the empty string. A `tool` message holds the result of the call
    `tool_call_id`. `reasoning_content` is an assistant's thinking, which the chat template may render.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        fields = without_idle(fields, _MAY_BE_NULL, IN_MESSAGE)
        if isinstance(fields, dict) and fields.get("tool_calls") and fields.get("content") is None:
            return fields | {"content": ""}
        return fields

    @field_validator("reasoning_content", "tool_calls", "tool_call_id", "name")
    @classmethod
    def _of_its_role(cls, value: Any, info: ValidationInfo) -> Any:
        role = _ROLE_OF_FIELD[str(info.field_name)]
        if info.data.get("role", role) != role:
            raise ValueError(f"this engine reads it in messages of the role {role!r} only; leave it out")
        return value

    @field_validator("content", mode="before")
    @classmethod
    def _text_of_parts(cls, content: Any) -> Any:
        if not isinstance(content, list):
            return content
        for part in content:
            if not (isinstance(part, dict) and part.keys() == {"type", "text"} and isinstance(part["text"], str)):
                raise ValueError("each part must be {'type': 'text', 'text': …}; this engine accepts only text")
            if part["type"] != "text":
                raise ValueError("each part must be of the type 'text'; this engine accepts only text")
        return "\n".join(part["text"] for part in content)


#: Fields that are valid only in messages of one role.
_ROLE_OF_FIELD: Final = {
    "reasoning_content": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
    "name": "tool",
}
_MAY_BE_NULL: Final = frozenset(_ROLE_OF_FIELD)


class StreamOptions(Wire):
    """OpenAI's `stream_options`, plus a minimum interval between chunks.

    With `interval_s`, chunks are at least that many seconds apart, except the last, and each carries the new tokens of
    all choices. The engine then pays for a chunk once per interval instead of once per token. A choice's newest token
    is held back until the engine knows that it does not end the choice; the text may be held back until the choice
    ends.
    """

    include_usage: bool = False
    interval_s: float = Field(default=0.0, ge=0.0, le=3600.0)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        return without_idle(fields, cls.model_fields, IN_STREAM)


class AnswerPrefix(Wire):
    """The tokens already sampled for sample `index` of an answer that another engine started; may be empty."""

    index: int = Field(ge=0, lt=MOST_SAMPLES)
    token_ids: list[int]


class Continuation(StrEnum):
    """The engine's support for `prefixes` and `stream_options.interval_s`; an engine supports both or neither."""

    NONE = "none"
    """Neither field is supported: the client restarts the answer."""
    OWN_NOISE = "own_noise"
    """The rest is sampled with fresh noise: a valid answer, but not the one that the first engine would have given."""
    SAME_NOISE = "same_noise"
    """The rest is sampled with the noise of the first engine: with the same weights, the answer is the same."""


class ChatCompletionRequest(Wire):
    """OpenAI's chat completion request, plus token ids in and out.

    Log-probs are those of the distribution sampled from, after temperature, top-k and top-p, unless `policy_logprobs`
    requests the policy's. The noise of sample i at position t depends only on (`seed`, i, t). No engine can force a
    tool call. An engine whose template does not support tools, calls or thinking rejects them by name.

    Attributes:
        model: the id of /v1/models, or the last part of the model's directory; None accepts any model.
        messages: the conversation, rendered by the chat template.
        prompt: text that is the prompt in place of `messages`, without the chat template.
        prompt_token_ids: token ids in place of the tokenised `messages`.
        tools: functions that the model may call; the chat template renders them unless `tool_choice` is "none".
        response_format: the required format of the answer, for engines with structured output.
        n: number of samples.
        max_tokens: most tokens per sample; `max_completion_tokens`, OpenAI's newer name, takes precedence.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the smallest set of likeliest tokens with at least this total probability.
        top_k: number of likeliest tokens to keep; 0, or more than the vocabulary, keeps all.
        min_p: drop tokens less likely than this share of the likeliest token's probability; applied with `top_k`,
            before `top_p`.
        frequency_penalty: lowers a token's logit per occurrence among the choice's sampled tokens.
        presence_penalty: lowers a token's logit once if the choice has sampled the token.
        logit_bias: added to logits by token id; like the penalties, applied before the temperature.
        stop: texts that end a choice; the answer is cut before the first of them.
        ignore_eos: let a sample continue past end-of-turn tokens, to `max_tokens`, the end of the context or a stop
            string (vLLM's name). The tokens up to the first end-of-turn token are unchanged.
        seed: seed of the sampling noise; None lets the engine choose.
        logprobs: return OpenAI's record of each token, with the `top_logprobs` likeliest tokens.
        policy_logprobs: report log-probs under the policy, softmax(logits / temperature) over the whole vocabulary,
            which a trainer recomputes; `top_p`, `top_k` and `min_p` then only decide which tokens can be sampled.
            Excludes `logit_bias`, penalties and `response_format`. Engines may reject it together with a truncation.
        stream: answer with server-sent events; see `stream_options`.
        return_token_ids: return `prompt_token_ids`, and each choice's `token_ids`, `token_logprobs`, `version_spans`.
        return_routed_experts: return the experts that a mixture-of-experts model chose for each token (vLLM's name).
            Row i of a choice's `routed_experts` belongs to the step that sampled new token i, so it has the experts of
            the token before. `prompt_routed_experts` cover all prompt tokens but the last. Engines may reject it.
        return_prompt_logprobs: return `prompt_logprobs`: the log-prob of each prompt token under softmax(logits /
            temperature). Needs a temperature above 0, and no stream. Engines may reject it.
        priority: requests with the lowest value leave the queue first. An engine with an unordered queue ignores
            priorities.
        user: accepted for OpenAI's clients, without effect.
        prefixes: requests the rest of an answer. Lists `n` samples by index, each with its tokens so far, which count
            towards `max_tokens`. The answer has the text of the whole answer, but only the new tokens, log-probs and
            spans. A stop string may span old and new tokens. A prefix that has already ended is rejected.
        chat_template_kwargs: variables for the chat template, as in vLLM (Qwen3's `enable_thinking`); unused ones are
            ignored. Variables that the engine sets itself cannot be overridden.
        continue_token_ids: the exact tokens of a conversation up to the end of the assistant message
            `messages[continue_from - 1]`. The prompt is these tokens, then the rendering of the later messages. If the
            template cannot append, the prompt is the rendering of all `messages`; `prompt_token_ids` of the answer
            shows the prompt that was used.
        continue_from: index of the first message after `continue_token_ids`.
    """

    model: str | None = None
    messages: list[ChatMessage] | None = None
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    tools: list[ToolDefinition] | None = Field(default=None, max_length=MOST_TOOLS)
    tool_choice: Literal["none", "auto"] = "auto"
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    n: int = Field(default=1, ge=1, le=MOST_SAMPLES)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=1.0, ge=0.0, le=100.0)
    top_p: float = Field(default=1.0, ge=LEAST_TOP_P, le=1.0)
    top_k: int = Field(default=0, ge=0, le=MOST_TOP_K, description="0 keeps every token")
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    frequency_penalty: float = Field(default=0.0, ge=-MOST_PENALTY, le=MOST_PENALTY)
    presence_penalty: float = Field(default=0.0, ge=-MOST_PENALTY, le=MOST_PENALTY)
    logit_bias: dict[int, Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]] | None = Field(
        default=None, max_length=MOST_BIASED_TOKENS
    )
    stop: str | list[str] | None = None
    ignore_eos: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MOST_TOP_LOGPROBS)
    policy_logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False
    return_prompt_logprobs: bool = False
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    user: str | None = None
    prefixes: list[AnswerPrefix] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    continue_token_ids: list[int] | None = None
    continue_from: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        return without_idle(fields, cls.model_fields, IN_REQUEST)

    @field_validator("top_k", mode="before")
    @classmethod
    def _every_token(cls, top_k: Any) -> Any:
        return 0 if top_k == -1 else top_k  # in vLLM's API, -1 keeps all tokens

    @field_validator("temperature")
    @classmethod
    def _greedy_or_warm(cls, temperature: float) -> float:
        if 0.0 < temperature < LEAST_TEMPERATURE:
            raise ValueError(f"must be 0, which is greedy, or at least {LEAST_TEMPERATURE:g}, got {temperature:g}")
        return temperature

    @field_validator("stop")
    @classmethod
    def _stops_somewhere(cls, stop: str | list[str] | None) -> str | list[str] | None:
        if stop == "" or (isinstance(stop, list) and "" in stop):
            raise ValueError("a stop string must not be empty; it would end every text at once")
        return stop

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _forces_no_call(cls, choice: Any) -> Any:
        if choice not in ("none", "auto"):
            raise ValueError("this engine cannot force the model to call a tool; use 'auto' or 'none'")
        return choice

    @field_validator("parallel_tool_calls")
    @classmethod
    def _limits_no_calls(cls, parallel: bool, info: ValidationInfo) -> bool:
        if not parallel and info.data.get("tools"):
            raise ValueError("this engine cannot limit the model to one call at a time; leave it out")
        return parallel

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, count: int | None, info: ValidationInfo) -> int | None:
        if count and not info.data.get("logprobs"):
            raise ValueError("top_logprobs is part of logprobs; set logprobs=true too")
        return count

    @model_validator(mode="after")
    def _prompt_given(self) -> Self:
        if not self.messages and not self.prompt and not self.prompt_token_ids:
            raise ValueError("one of messages, prompt and prompt_token_ids must be given and not empty")
        return self

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Self:
        ids, start, messages = self.continue_token_ids, self.continue_from, self.messages or []
        if ids is None and start is None:
            return self
        if not ids or start is None or self.prompt_token_ids:
            raise ValueError(
                "continue_token_ids and continue_from must be given together, with messages and without "
                "prompt_token_ids"
            )
        if start > len(messages) or messages[start - 1].role != "assistant":
            raise ValueError("continue_from must be the position after an assistant message")
        return self

    @model_validator(mode="after")
    def _extra_columns_can_be_told(self) -> Self:
        if self.return_routed_experts and not self.return_token_ids:
            raise ValueError("return_routed_experts needs the token ids; set return_token_ids=true too")
        if self.return_prompt_logprobs and (self.stream or not self.temperature):
            raise ValueError("return_prompt_logprobs needs a temperature above 0 and stream=false")
        return self

    @field_validator("policy_logprobs")
    @classmethod
    def _of_unchanged_logits(cls, requested: bool, info: ValidationInfo) -> bool:
        changing = ("logit_bias", "frequency_penalty", "presence_penalty", "response_format")
        if requested and (used := [name for name in changing if info.data.get(name)]):
            raise ValueError(f"the policy knows no {used[0]}; leave {used[0]} or policy_logprobs out")
        return requested

    @model_validator(mode="after")
    def _prefixes_of_n_samples(self) -> Self:
        if self.prefixes is None:
            return self
        indices = [prefix.index for prefix in self.prefixes]
        if len(indices) != self.n:
            raise ValueError(f"n must be the number of prefixes, {len(indices)}, got {self.n}")
        if indices != sorted(set(indices)):
            raise ValueError("the indices of prefixes must increase")
        return self

    @property
    def token_limit(self) -> int | None:
        """The most tokens to sample per choice; None means up to the end of the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a choice; the answer is cut before the first of them."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class FinishReason(StrEnum):
    """Reasons why a choice (one sample) ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TOOL_CALLS = "tool_calls"


#: (model_version, num_tokens): a run of tokens sampled by one version of the weights. Runs are listed oldest first.
Span = tuple[int, int]


class TopLogprob(Wire):
    """One of the likeliest tokens at a position."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Wire):
    """OpenAI's record of one token. `top_logprobs` lists the likeliest tokens that can be sampled, likeliest first."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Wire):
    """OpenAI's `logprobs` of one choice."""

    content: list[TokenLogprob]


class AssistantMessage(Wire):
    """The answer's text, and the reasoning and tool calls parsed from it."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Wire):
    """One of the `n` samples.

    Attributes:
        index: number of the sample.
        message: the answer.
        finish_reason: the reason that the sample ended.
        logprobs: OpenAI's records, if the request sets `logprobs`.
        token_ids: the sampled tokens. This field and the next two are set if the request sets `return_token_ids`.
        token_logprobs: log-prob of each token under the distribution it was sampled from, or with `policy_logprobs`
            under the policy.
        version_spans: pairs (version of the weights, number of consecutive tokens that this version sampled), in order.
        routed_experts: the experts of each token, if the request sets `return_routed_experts`.
    """

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    version_spans: list[Span] | None = None
    routed_experts: RoutedExperts | None = None


class Usage(Wire):
    """Token counts; a prompt shared by several samples counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(Wire):
    """The complete answer to a chat completion request.

    Attributes:
        prompt_token_ids: the prompt, if the request sets `return_token_ids`.
        prompt_routed_experts: the experts of all prompt tokens but the last, if the request sets
            `return_routed_experts`.
        prompt_logprobs: log-prob of each prompt token (0 for the first), if the request sets `return_prompt_logprobs`.
        model_version: newest version of the weights that sampled a token of the answer.
        epoch: number of the trainer process whose weights the engine served when the answer began.
    """

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_routed_experts: RoutedExperts | None = None
    prompt_logprobs: list[float] | None = None
    model_version: int
    epoch: int = 0


class Delta(Wire):
    """The text, thinking and tool calls that one chunk of a stream adds to a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Wire):
    """The part of one choice in one chunk of a streamed answer."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    version_spans: list[Span] | None = None
    routed_experts: RoutedExperts | None = None


class ChatCompletionChunk(Wire):
    """One server-sent event of a streamed answer; `data: [DONE]` follows the last. All chunks have the same `epoch`."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    prompt_routed_experts: RoutedExperts | None = None
    model_version: int
    epoch: int = 0


# --- state -------------------------------------------------------------------------------------------------------


class ModelCard(Wire):
    """A served model: OpenAI's card plus the facts that a trainer needs to update it.

    `layout` describes the parameters as the engine stores them. An update may also send parameters in a dtype of
    `converts`; the engine casts them. `digest` is that of the last update's bytes.
    """

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "pipelinerl"
    model_version: int
    epoch: int
    context_length: int
    layout: WeightLayout
    layout_id: str
    converts: tuple[DType, ...] = ()
    digest: str | None = None


class ModelList(Wire):
    """OpenAI's list of models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class EngineState(StrEnum):
    """The engine's readiness for work."""

    READY = "ready"
    DIRTY = "dirty"
    STOPPED = "stopped"


class Health(Wire):
    """Liveness and supported features. Served without authentication, so it must not contain anything confidential."""

    state: EngineState
    model_version: int
    epoch: int
    continuation: Continuation = Continuation.NONE


class EngineMetrics(Wire):
    """Current load, and totals since the engine started; `/metrics` prints them in Prometheus' text format.

    Attributes:
        running_sequences: sequences that are decoded now.
        waiting_sequences: sequences in the queue.
        slots: most sequences decoded at once.
        decode_steps_total: decode steps; `occupied_slot_steps_total` sums the running sequences over these steps.
        busy_s_total: seconds in which the engine had work.
        last_update_pause_s: seconds that the last weight update stopped decoding.
        last_update_receive_s: seconds that receiving the last weight update took.
        weight_bytes: memory of the weights.
        cache_bytes: memory of the KV cache.
        cache_used_share: share of the blocks of a paged cache that running sequences hold.
        reused_prompt_tokens_total: prompt tokens whose keys and values were found in the cache.
        preemptions_total: preemptions of running sequences because the cache was full.
    """

    running_sequences: int = 0
    waiting_sequences: int = 0
    slots: int = 0
    generated_tokens_total: int = 0
    prompt_tokens_total: int = 0
    finished_sequences_total: int = 0
    aborted_sequences_total: int = 0
    decode_steps_total: int = 0
    occupied_slot_steps_total: int = 0
    busy_s_total: float = 0.0
    weight_updates_total: int = 0
    weight_update_failures_total: int = 0
    last_update_pause_s: float = 0.0
    last_update_receive_s: float = 0.0
    weight_bytes: int = 0
    cache_bytes: int = 0
    cache_used_share: float = 0.0
    reused_prompt_tokens_total: int = 0
    preemptions_total: int = 0
    model_version: int = 0
    epoch: int = 0
