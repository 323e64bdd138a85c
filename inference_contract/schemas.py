"""Wire types of chat completions and of an engine's state: frozen, validated, closed. `weights` has those of updates.

A field that would be ignored is refused by name, never dropped in silence; one that clients send by default, and that
changes nothing at this value, is taken (`idle_fields`). Shapes are in elements, times in seconds, sizes in bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from inference_contract.idle_fields import OF_MESSAGE, OF_REQUEST, OF_STREAM, without_idle
from inference_contract.response_format import ResponseFormat
from inference_contract.routed_experts import RoutedExperts
from inference_contract.tools import ToolCall, ToolCallDelta, ToolDefinition
from inference_contract.weights import DType, WeightLayout
from inference_contract.wire import Wire

# --- chat completions --------------------------------------------------------------------------------------------

#: Engines sample in float32 and count in int32: what lies between these bounds and zero, or above, has no place there.
LEAST_TEMPERATURE: Final = 1e-5
LEAST_TOP_P: Final = 1e-6
MOST_TOP_K: Final = 2**31 - 1
#: Of one request.
MOST_SAMPLES: Final = 1024
#: Of `priority`, to either side.
MOST_PRIORITY: Final = 2**31 - 1
#: Of one request, or of one token.
MOST_TOOLS: Final = 1024
MOST_BIASED_TOKENS: Final = 1024
MOST_TOP_LOGPROBS: Final = 20
#: Limits of a token's bias and of the two penalties, to either side.
MOST_BIAS: Final = 100.0
MOST_PENALTY: Final = 2.0


class ChatMessage(Wire):
    """One message of a conversation. Text parts, OpenAI's other form of `content`, become lines of one text.

    An assistant's `content` may be null beside `tool_calls`, and is then empty. A `tool` message is the result of the
    call that `tool_call_id` names. `reasoning_content` is an assistant's thinking, which the chat template may show.
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
        fields = without_idle(fields, _MAY_BE_NULL, OF_MESSAGE)
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
                raise ValueError("each part must be {'type': 'text', 'text': …}; this engine reads nothing but text")
            if part["type"] != "text":
                raise ValueError("each part must be of the type 'text'; this engine reads nothing but text")
        return "\n".join(part["text"] for part in content)


#: Fields that only messages of one role have.
_ROLE_OF_FIELD: Final = {
    "reasoning_content": "assistant",
    "tool_calls": "assistant",
    "tool_call_id": "tool",
    "name": "tool",
}
_MAY_BE_NULL: Final = frozenset(_ROLE_OF_FIELD)


class StreamOptions(Wire):
    """OpenAI's `stream_options`, plus how rarely a chunk comes.

    With `interval_s`, that many seconds lie between two chunks, but for the last; each has what was sampled meanwhile,
    of every choice. A chunk then costs the engine what a chunk costs, not what a token does; the text of a choice may
    wait for its end, and so may its newest token, until it is known not to end it.
    """

    include_usage: bool = False
    interval_s: float = Field(default=0.0, ge=0.0, le=3600.0)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        return without_idle(fields, cls.model_fields, OF_STREAM)


class AnswerPrefix(Wire):
    """What is sampled already of sample `index` of an answer that another engine began, maybe nothing."""

    index: int = Field(ge=0, lt=MOST_SAMPLES)
    token_ids: list[int]


class Continuation(StrEnum):
    """What an engine makes of `prefixes`, and of `stream_options.interval_s`, which it knows if it knows them."""

    NONE = "none"
    """It knows neither: who asks begins anew."""
    OWN_NOISE = "own_noise"
    """It goes on, with noise that the sample would not have had: an answer as good, but another."""
    SAME_NOISE = "same_noise"
    """It goes on with the noise of the positions that are left: the same weights give the undisturbed answer."""


class ChatCompletionRequest(Wire):
    """OpenAI's chat completion, plus token ids in and out.

    `prompt_token_ids` replaces the tokenised `messages`. With `return_token_ids` each choice carries `token_ids`,
    `token_logprobs` and `version_spans`. Log-probs are those of the distribution sampled from, after temperature,
    top-k and top-p. The noise of sample i at position t is a function of (`seed`, i, t) alone. A `temperature` of 0 is
    greedy; a `top_k` beyond the vocabulary keeps every token. Of requests that wait at the engine those of the lowest
    `priority` begin first; an engine that cannot order what waits takes it for 0.

    With `ignore_eos`, vLLM's word, no token ends a sample: it goes on to `max_tokens`, the context's end or a stop
    string, and is the sample without it up to where that ends.

    `prefixes` asks for the rest of an answer: `n` samples, each by its index, with the tokens that are sampled already
    and count towards `max_tokens`. What comes is new tokens with their log-probs and spans; the text is that of the
    whole answer, and a stop string may lie across the border. A prefix that has ended already is refused.

    `return_routed_experts` (vLLM's word) asks a mixture-of-experts model which experts each token was computed by. Row
    i of a choice's `routed_experts` is of the token before its i-th new one, at the step that sampled the latter; the
    answer's `prompt_routed_experts` are of the prompt's tokens but the last. An engine that does not tell refuses it.

    `continue_token_ids` continues a conversation to the token: they are its tokens up to the end of the assistant's
    answer `messages[continue_from - 1]`, and the messages from `continue_from` on are new. The prompt is these ids, and
    what the chat template writes after that answer. Where the template does not append, the prompt is the rendering of
    all `messages`; `prompt_token_ids` of the answer show which of the two it was.

    `chat_template_kwargs` are names that the chat template may look up beside the messages (Qwen3's `enable_thinking`),
    as vLLM's; a template that looks up no such name is not changed by it, nor is an engine without templates. What the
    engine itself gives its template may not be set.

    `tools` are rendered by the chat template, unless `tool_choice` is "none"; no engine can force a call. An engine
    whose template has no place for tools, for calls or for thinking rejects them by name. `prompt` replaces `messages`
    by a text that no template renders.

    `logit_bias`, `presence_penalty` and `frequency_penalty` change the logits before the temperature does; a penalty
    counts the tokens that the choice has sampled. `min_p` then drops tokens less likely than that share of the
    likeliest, beside `top_k` and before `top_p`. The model may be named by the last part of its directory.
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
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    return_routed_experts: bool = False
    priority: int = Field(default=0, ge=-MOST_PRIORITY, le=MOST_PRIORITY)
    user: str | None = None
    prefixes: list[AnswerPrefix] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str] = Field(default_factory=dict)
    continue_token_ids: list[int] | None = None
    continue_from: int | None = Field(default=None, ge=1)

    @model_validator(mode="before")
    @classmethod
    def _without_idle(cls, fields: Any) -> Any:
        return without_idle(fields, cls.model_fields, OF_REQUEST)

    @field_validator("top_k", mode="before")
    @classmethod
    def _every_token(cls, top_k: Any) -> Any:
        return 0 if top_k == -1 else top_k  # as vLLM says it

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
            raise ValueError("a stop string must have a character; an empty one would end every text at its first")
        return stop

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _forces_no_call(cls, choice: Any) -> Any:
        if choice not in ("none", "auto"):
            raise ValueError("this engine cannot force the model to call a tool; say 'auto' or 'none'")
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
            raise ValueError("the likeliest tokens are part of logprobs; say logprobs=true, too")
        return count

    @model_validator(mode="after")
    def _prompt_given(self) -> Self:
        if not self.messages and not self.prompt and not self.prompt_token_ids:
            raise ValueError("one of messages and prompt_token_ids must be given and not empty")
        return self

    @model_validator(mode="after")
    def _continues_an_answer(self) -> Self:
        ids, start, messages = self.continue_token_ids, self.continue_from, self.messages or []
        if ids is None and start is None:
            return self
        if not ids or start is None or self.prompt_token_ids:
            raise ValueError(
                "continue_token_ids and continue_from must be given together, beside messages and without "
                "prompt_token_ids"
            )
        if start > len(messages) or messages[start - 1].role != "assistant":
            raise ValueError("continue_from must be the place after a message of the assistant")
        return self

    @model_validator(mode="after")
    def _experts_of_known_tokens(self) -> Self:
        if self.return_routed_experts and not self.return_token_ids:
            raise ValueError("return_routed_experts speaks of tokens, which return_token_ids must ask for, too")
        return self

    @model_validator(mode="after")
    def _prefixes_of_n_samples(self) -> Self:
        if self.prefixes is None:
            return self
        indices = [prefix.index for prefix in self.prefixes]
        if len(indices) != self.n:
            raise ValueError(f"n must be the number of prefixes, {len(indices)}, got {self.n}")
        if indices != sorted(set(indices)):
            raise ValueError("the indices of prefixes must rise")
        return self

    @property
    def token_limit(self) -> int | None:
        """Most tokens to sample per choice; None means up to the context's end."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a choice; the text is cut before the first of them."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class FinishReason(StrEnum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    TOOL_CALLS = "tool_calls"


#: (model_version, num_tokens), run-length, oldest first: which weights sampled which tokens.
Span = tuple[int, int]


class TopLogprob(Wire):
    """One of the likeliest tokens."""

    token: str
    logprob: float
    bytes: list[int] | None = None


class TokenLogprob(Wire):
    """OpenAI's per-token record. `top_logprobs` has the likeliest tokens first, fewer where fewer can be sampled."""

    token: str
    logprob: float
    bytes: list[int] | None = None
    top_logprobs: list[TopLogprob] = Field(default_factory=list)


class ChoiceLogprobs(Wire):
    """OpenAI's `logprobs` of one choice."""

    content: list[TokenLogprob]


class AssistantMessage(Wire):
    """The answer's text, and what was parsed out of it."""

    role: Literal["assistant"] = "assistant"
    content: str
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Wire):
    """One of the `n` samples."""

    index: int
    message: AssistantMessage
    finish_reason: FinishReason
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    version_spans: list[Span] | None = None
    routed_experts: RoutedExperts | None = None


class Usage(Wire):
    """Token counts; the prompt is counted once however many samples share it."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(Wire):
    """The whole answer. `epoch` is the trainer epoch whose weights began to sample it."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None = None
    prompt_routed_experts: RoutedExperts | None = None
    model_version: int
    epoch: int = 0


class Delta(Wire):
    """What a chunk adds to a choice."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Wire):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    finish_reason: FinishReason | None = None
    logprobs: ChoiceLogprobs | None = None
    token_ids: list[int] | None = None
    token_logprobs: list[float] | None = None
    version_spans: list[Span] | None = None
    routed_experts: RoutedExperts | None = None


class ChatCompletionChunk(Wire):
    """One server-sent event of a streamed answer; `data: [DONE]` follows the last. All have the same `epoch`."""

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
    """A served model: OpenAI's card plus what a trainer must know to update it.

    `layout` is how the engine keeps its parameters. An update may carry any of them in a dtype of `converts`, too: the
    engine makes its own of it. `digest` is of the bytes that came.
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
    """May the engine be given work?"""

    READY = "ready"
    DIRTY = "dirty"
    STOPPED = "stopped"


class Health(Wire):
    """Liveness, and what may be asked; answered without a token, so it carries nothing that is worth one."""

    state: EngineState
    model_version: int
    epoch: int
    continuation: Continuation = Continuation.NONE


class EngineMetrics(Wire):
    """Load and totals since the engine started; `/metrics` prints them in Prometheus' text form."""

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
    model_version: int = 0
    epoch: int = 0
