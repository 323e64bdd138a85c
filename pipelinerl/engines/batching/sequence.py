"""One request and its samples while they are being generated, the results of each step, and the contract's response.

In a `Sequence`, `token_ids`, `logprobs` and `spans()` always describe the same tokens, and a span names the version of
the weights that sampled its tokens. Only the positions at which the version changes are stored.

A `TextWindow` holds the growing text of a sample: its decoded tokens, without the end-of-turn token, cut before a stop
string. Text that may begin a stop string is held back until later tokens show whether it does.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from inference_contract.errors import ContractError, NotFinite
from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import (
    AnswerPrefix,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChoiceLogprobs,
    ChunkChoice,
    Delta,
    FinishReason,
    Span,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from inference_contract.tools import FunctionCallDelta, ResponseFormat, ToolCallDelta
from pipelinerl.answers.tool_calls import ParsedAnswer
from pipelinerl.engines.batching.logit_changes import LogitChange
from pipelinerl.models.detokenizer import IncrementalDetokenizer
from pipelinerl.models.tokenizer import ChatTokenizer, offered_tools
from pipelinerl.numerics.routed_experts import on_the_wire
from trainer_contract.types import Experts

#: (token id, log-prob) of the likeliest tokens of a step, likeliest first.
TopTokens = list[tuple[int, float]]


class TextWindow:
    """The growing text of one sample, cut before the first of the strings `stops` that appears in it."""

    def __init__(self, detokenizer: IncrementalDetokenizer, stops: tuple[str, ...]) -> None:
        self.text = ""
        self._detokenizer = detokenizer
        self._stops = stops
        self._longest_stop = max((len(stop) for stop in stops), default=0)
        self._shown = 0
        self._stopped = False

    def push(self, token_id: int) -> bool:
        """Append a token's text; if the text now contains a stop string, cut it before that string and return True."""
        return self._append(self._detokenizer.push(token_id))

    def close(self) -> None:
        """End the text; append the incomplete character, if any, that the detokenizer still holds back."""
        if not self._stopped:
            self._append(self._detokenizer.flush())
            self._stopped = True

    def take(self) -> str:
        """Return the text that became final since the last call."""
        end = len(self.text) if self._stopped else len(self.text) - self._held_back()
        new = self.text[self._shown : end]
        self._shown = max(self._shown, end)
        return new

    def _append(self, new: str) -> bool:
        if not new:
            return False
        # A stop string may have begun before the new text, but must end within it.
        start = max(0, len(self.text) - self._longest_stop + 1)
        self.text += new
        ends = [at for at in (self.text.find(stop, start) for stop in self._stops) if at >= 0]
        if ends:
            self.text = self.text[: min(ends)]
            self._stopped = True
        return self._stopped

    def _held_back(self) -> int:
        for length in range(min(self._longest_stop - 1, len(self.text)), 0, -1):
            if any(stop.startswith(self.text[-length:]) for stop in self._stops):
                return length
        return 0


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    """One of the `n` samples of a request. Its noise depends on `noise_key`, not on the batch that it runs in.

    `prefix` holds the tokens of the answer that another engine has sampled. All other fields describe the tokens
    sampled by this engine, at most `token_limit`. If requested, `routed` has one entry per sampled token: the experts
    [layers, top_k] of the step that sampled it, whose input was the token before it. If requested, `top` has the
    likeliest tokens of each step.

    `prompt_cache_is_current` is true if the serving weights computed the cached keys and values of the prompt. Another
    sample of the request may then copy them.
    """

    request: Request
    index: int
    noise_key: int
    token_limit: int
    prefix: list[int] = field(default_factory=list)
    text: TextWindow | None = None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    routed: list[Experts] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prompt_cache_is_current: bool = True
    _marks: list[tuple[int, int]] = field(default_factory=list)

    def mark_version(self, version: int) -> None:
        """Record that the weights of `version` sample the next token and all later ones."""
        if not self._marks or self._marks[-1][0] != version:
            self._marks.append((version, len(self.token_ids)))

    def spans(self, start: int = 0, end: int | None = None) -> list[Span]:
        """Return (model_version, num_tokens) spans of tokens [start, end), by default all; any thread may call it."""
        upto = len(self.token_ids) if end is None else end
        marks = list(self._marks)
        nexts = [at for _, at in marks[1:]] + [upto]
        counted = (
            (version, min(following, upto) - max(at, start))
            for (version, at), following in zip(marks, nexts, strict=True)
        )
        return [(version, count) for version, count in counted if count > 0]

    def certain(self) -> tuple[FinishReason | None, int]:
        """Return the finish reason and how many tokens any thread may read: of a running sample, all but the last."""
        reason = self.finish_reason  # read the finish reason first: once it is set, no token is added
        return reason, max(len(self.logprobs) - (reason is None), 0)

    @property
    def context(self) -> list[int]:
        """All tokens that the next token follows: the prompt, the prefix, and the sampled tokens."""
        return self.request.prompt_token_ids + self.prefix + self.token_ids

    @property
    def newest_version(self) -> int:
        """The version that sampled the last token; before the first token, the version that samples it; 0 if none."""
        return self.version_of(len(self.token_ids) - 1)

    def version_of(self, position: int) -> int:
        """Return the version of the weights that sampled token `position`; for -1, as `newest_version` does."""
        return next((version for version, start in reversed(self._marks) if start <= max(position, 0)), 0)


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One chat completion in progress: a prompt and its samples.

    `token_limit` is the most tokens of a choice, already cut to the context length. `stop_ids` are the tokens that end
    a choice earlier. `epoch` is the epoch of the weights with which the request began. `unfinished` counts samples
    without a finish reason. Waiting requests with the lowest `priority` begin first.

    With `tells_routing`, `prompt_routed` [tokens - 1, layers, top_k] has the experts of all prompt tokens but the last,
    as first computed. With `scores_prompt`, `prompt_logprobs` [tokens] are computed with the weights with which the
    request began. With `policy_logprobs`, log-probs are those before top-k, top-p and min-p.
    """

    request_id: str
    prompt_token_ids: list[int]
    token_limit: int
    temperature: float
    top_p: float
    top_k: int
    streams: bool
    stop_ids: frozenset[int]
    priority: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    started: int = 0
    unfinished: int = 0
    epoch: int = 0
    min_p: float = 0.0
    num_top: int = 0
    change: LogitChange | None = None
    response_format: ResponseFormat | None = None
    tells_routing: bool = False
    prompt_routed: Experts | None = None
    scores_prompt: bool = False
    prompt_logprobs: list[float] | None = None
    policy_logprobs: bool = False

    @property
    def truncates(self) -> bool:
        """True if a token that the policy may choose could be dropped before sampling."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    def add_sequence(
        self, noise_key: int, text: TextWindow | None = None, *, prefix: AnswerPrefix | None = None
    ) -> None:
        """Add the request's next sample; `prefix` holds its first tokens if another engine has already sampled some."""
        if prefix is None:
            prefix = AnswerPrefix(index=len(self.sequences), token_ids=[])
        self.sequences.append(
            Sequence(
                request=self,
                index=prefix.index,
                noise_key=noise_key,
                token_limit=self.token_limit - len(prefix.token_ids),
                prefix=prefix.token_ids,
                text=text,
            )
        )
        self.unfinished += 1

    @property
    def shares_prompt(self) -> bool:
        """True if no sample has a prefix, so that all samples continue the same tokens, the prompt."""
        return not any(sequence.prefix for sequence in self.sequences)


def extend(running: list[Sequence], token_ids: list[int], logprobs: list[float]) -> list[int]:
    """Append one step's tokens, end-of-turn tokens included; set finish reasons, and return the ended rows in order."""
    ended = []
    for row, sequence in enumerate(running):
        token_id = token_ids[row]
        sampled = sequence.token_ids
        sampled.append(token_id)
        sequence.logprobs.append(logprobs[row])
        if token_id in sequence.request.stop_ids or (sequence.text is not None and sequence.text.push(token_id)):
            sequence.finish_reason = FinishReason.STOP
        elif len(sampled) >= sequence.token_limit:
            sequence.finish_reason = FinishReason.LENGTH
        else:
            continue
        ended.append(row)
    return ended


# --- results of a step, and the response ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SampledToken:
    """The result of one step for one streamed sample; `token_id` is None if the sample ended without a token."""

    index: int
    text: str
    token_id: int | None
    logprob: float
    version: int
    finish_reason: FinishReason | None
    routed: Experts | None = None
    """The experts [layers, top_k] of the token before `token_id`, if requested."""
    top: TopTokens | None = None
    """The likeliest tokens at the position of `token_id`, if requested."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """The results of one step for one request: its streamed tokens, its end (`is_last`), or the error that ended it."""

    request: Request
    tokens: tuple[SampledToken, ...] = ()
    is_last: bool = False
    error: ContractError | None = None


#: The first characters of tool calls in all formats, apart from the tags of thinking, which may still be incomplete.
_MAY_CALL: Final = re.compile(r"[\[{]|<(?!/?think>)")
_BEGUN_TAG: Final = re.compile(r"</?(?:t(?:h(?:i(?:n(?:k)?)?)?)?)?\Z")
#: Text with which a call of gpt-oss may begin an answer.
_RECIPIENT: Final = "to="


@dataclass(slots=True)
class ShownText:
    """The part of a text sent although tools are offered: `sent` characters, without white space at either end."""

    sent: int = 0
    pending: str = ""
    has_ended: bool = False

    def more(self, text: str) -> str:
        """Return what can be sent after `text` has been sampled."""
        if self.has_ended:
            return ""
        self.pending += text
        if not self.sent and _RECIPIENT.startswith(self.pending[: len(_RECIPIENT)]):
            return ""
        begun = _BEGUN_TAG.search(self.pending)
        end = begun.start() if begun else len(self.pending)
        if call := _MAY_CALL.search(self.pending, 0, end):
            end, self.has_ended = call.start(), True
        certain = self.pending[:end].rstrip()
        if not self.sent and certain[:1].isspace():
            certain, self.has_ended = "", True
        self.sent, self.pending = self.sent + len(certain), self.pending[len(certain) :]
        return certain


class ResponseWriter:
    """Builder of the response to `request`: one object, or a stream of chunks of one token or of all new ones."""

    def __init__(self, chat: ChatCompletionRequest, request: Request, *, model: str, tokenizer: ChatTokenizer) -> None:
        self.newest_version = 0
        """The newest version in the chunks of `new_tokens` so far."""
        self._chat = chat
        self._request = request
        self._model = model
        self._tokenizer = tokenizer
        self._sent = [0] * len(request.sequences)
        self._ended = [False] * len(request.sequences)
        self._opened = False
        self._shown: dict[int, ShownText] = {}

    def completion(self) -> ChatCompletion:
        """Return the whole response; its `model_version` is the newest version that sampled any of its tokens."""
        request = self._request
        return ChatCompletion(
            id=request.request_id,
            created=int(time.time()),
            model=self._model,
            choices=[self._choice(sequence) for sequence in request.sequences],
            usage=_usage(request),
            prompt_token_ids=request.prompt_token_ids if self._chat.return_token_ids else None,
            prompt_routed_experts=_prompt_routed(request),
            prompt_logprobs=request.prompt_logprobs,
            model_version=max(sequence.newest_version for sequence in request.sequences),
            epoch=request.epoch,
        )

    def first_chunk(self, version: int) -> ChatCompletionChunk:
        """Return the chunk that opens a stream: the role of every choice, and the prompt's tokens."""
        opening = Delta(role="assistant", content="")
        choices = [ChunkChoice(index=sequence.index, delta=opening) for sequence in self._request.sequences]
        return self._chunk(version, choices, opens=True)

    def token_chunk(self, token: SampledToken) -> ChatCompletionChunk:
        """Return the chunk for one token of one choice."""
        token_ids = [] if token.token_id is None else [token.token_id]
        logprobs = [token.logprob] * len(token_ids)
        top = [] if token.top is None else [token.top]
        returned, reason = self._chat.return_token_ids, token.finish_reason
        delta = Delta(content=token.text or None)
        if offered_tools(self._chat):
            # Text after the first character that may begin a call is held back: calls are known at the end.
            shown = self._shown.setdefault(token.index, ShownText())
            if reason is None:
                delta = Delta(content=shown.more(token.text) or None)
            else:
                answer = self._answer(next(each for each in self._request.sequences if each.index == token.index))
                delta = _delta(replace(answer, content=answer.content[shown.sent :]))
                reason = _reason(reason, answer)
        choice = ChunkChoice(
            index=token.index,
            delta=delta,
            finish_reason=reason,
            logprobs=self._logprobs(token_ids, logprobs, top),
            token_ids=token_ids if returned else None,
            token_logprobs=logprobs if returned else None,
            version_spans=[(token.version, len(token_ids))] * len(token_ids) if returned else None,
            routed_experts=_routed([] if token.routed is None else [token.routed], self._request),
        )
        return self._chunk(token.version, [choice])

    def new_tokens(self, *, all_of_it: bool) -> ChatCompletionChunk | None:
        """Return the chunk of the tokens sampled since the last call, or None if there are none.

        A choice's text is sent once, when the choice ends. `all_of_it` is True once the request has ended.
        """
        choices = []
        for place, sequence in enumerate(self._request.sequences):
            start, (reason, end) = self._sent[place], sequence.certain()
            if all_of_it:
                end = len(sequence.token_ids)
            if end == start and (reason is None or self._ended[place]):
                continue
            self._sent[place], self._ended[place] = end, reason is not None
            self.newest_version = max(self.newest_version, sequence.version_of(end - 1))
            choices.append(self._part(sequence, start, end, reason))
        if not choices:
            return None
        opens, self._opened = not self._opened, True
        return self._chunk(self.newest_version, choices, opens=opens)

    def usage_chunk(self, version: int) -> ChatCompletionChunk:
        """Return the last chunk of a stream, with its usage; for requests with `include_usage`."""
        return self._chunk(version, [], used=_usage(self._request))

    def _choice(self, sequence: Sequence) -> Choice:
        returned, answer = self._chat.return_token_ids, self._answer(sequence)
        return Choice(
            index=sequence.index,
            message=AssistantMessage(content=answer.content, tool_calls=list(answer.calls) or None),
            finish_reason=_reason(sequence.finish_reason or FinishReason.ABORT, answer),
            logprobs=self._logprobs(sequence.token_ids, sequence.logprobs, sequence.top),
            token_ids=sequence.token_ids if returned else None,
            token_logprobs=sequence.logprobs if returned else None,
            version_spans=sequence.spans() if returned else None,
            routed_experts=_routed(sequence.routed, sequence.request),
        )

    def _part(self, sequence: Sequence, start: int, end: int, reason: FinishReason | None) -> ChunkChoice:
        token_ids, logprobs = sequence.token_ids[start:end], sequence.logprobs[start:end]
        returned = self._chat.return_token_ids
        role: Literal["assistant"] | None = "assistant" if start == 0 else None
        delta = Delta(role=role)
        if reason is not None:
            answer = self._answer(sequence)
            delta, reason = _delta(answer, role=role), _reason(reason, answer)
        return ChunkChoice.model_construct(  # skip validation, which is slow here; the values are trusted
            index=sequence.index,
            delta=delta,
            finish_reason=reason,
            logprobs=self._logprobs(token_ids, logprobs, sequence.top[start:end]),
            token_ids=token_ids if returned else None,
            token_logprobs=logprobs if returned else None,
            version_spans=sequence.spans(start, end) if returned else None,
            routed_experts=_routed(sequence.routed[start:end], self._request),
        )

    def _answer(self, sequence: Sequence) -> ParsedAnswer:
        """Return the text and its tool calls; the calls' ids depend only on the tokens and the prompt's length."""
        sampled = sequence.prefix + sequence.token_ids
        if sequence.text is not None:
            sequence.text.close()
            text = sequence.text.text
        else:
            ended = bool(sampled) and sampled[-1] in sequence.request.stop_ids
            text = self._tokenizer.decode(sampled[:-1] if ended else sampled)
        tools = offered_tools(self._chat)
        if not tools:
            return ParsedAnswer(text)
        prompt = sequence.request.prompt_token_ids
        key = np.asarray([len(prompt), *sampled], np.int64).tobytes()
        return self._tokenizer.parse_answer(text, tools, prompt_token_ids=prompt, key=key)

    def _logprobs(self, token_ids: Items[int], logprobs: Items[float], top: Items[TopTokens]) -> ChoiceLogprobs | None:
        if not self._chat.logprobs:
            return None
        content = []
        for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
            likeliest = [TopLogprob(logprob=each, **self._spelling(other)) for other, each in top[place]] if top else []
            content.append(TokenLogprob(logprob=logprob, top_logprobs=likeliest, **self._spelling(token_id)))
        return ChoiceLogprobs(content=content)

    def _spelling(self, token_id: int) -> dict[str, Any]:
        """Return a token's bytes, and their text, in which an incomplete character is U+FFFD."""
        spelled = self._tokenizer.bytes_of(token_id)
        return {"token": spelled.decode(errors="replace"), "bytes": list(spelled)}

    def _chunk(
        self, version: int, choices: list[ChunkChoice], *, used: Usage | None = None, opens: bool = False
    ) -> ChatCompletionChunk:
        request = self._request
        return ChatCompletionChunk(
            id=request.request_id,
            created=int(time.time()),
            model=self._model,
            choices=choices,
            usage=used,
            prompt_token_ids=request.prompt_token_ids if opens and self._chat.return_token_ids else None,
            prompt_routed_experts=_prompt_routed(request) if opens else None,
            model_version=version,
            epoch=request.epoch,
        )


def _usage(request: Request) -> Usage:
    prompt, sampled = len(request.prompt_token_ids), sum(len(sequence.token_ids) for sequence in request.sequences)
    return Usage(prompt_tokens=prompt, completion_tokens=sampled, total_tokens=prompt + sampled)


def _routed(rows: Items[Experts], request: Request) -> RoutedExperts | None:
    if not request.tells_routing or request.prompt_routed is None:
        return None
    return on_the_wire(np.stack(rows) if rows else request.prompt_routed[:0])


def _prompt_routed(request: Request) -> RoutedExperts | None:
    return None if request.prompt_routed is None else on_the_wire(request.prompt_routed)


def _reason(reason: FinishReason, answer: ParsedAnswer) -> FinishReason:
    return FinishReason.TOOL_CALLS if answer.calls and reason is FinishReason.STOP else reason


def _delta(answer: ParsedAnswer, *, role: Literal["assistant"] | None = None) -> Delta:
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


def deliveries(streamed: Iterable[tuple[Request, SampledToken]], finished: Iterable[Request]) -> list[Delivery]:
    """Group one step's streamed tokens and the requests that ended with this step into deliveries, one per request."""
    tokens: dict[str, list[SampledToken]] = {}
    requests: dict[str, Request] = {}
    for request, token in streamed:
        tokens.setdefault(request.request_id, []).append(token)
        requests[request.request_id] = request
    last = {request.request_id: request for request in finished}
    return [Delivery(r, tuple(tokens.get(i, ())), i in last) for i, r in (requests | last).items()]


def sampled(sequence: Sequence) -> tuple[Request, SampledToken]:
    """Return the newest token of a streamed sample, with the text that became final with this token."""
    position = len(sequence.token_ids) - 1
    token = SampledToken(
        index=sequence.index,
        text=_certain_text(sequence),
        token_id=sequence.token_ids[position],
        logprob=sequence.logprobs[position],
        version=sequence.version_of(position),
        finish_reason=sequence.finish_reason,
        routed=sequence.routed[position] if sequence.request.tells_routing else None,
        top=sequence.top[position] if sequence.request.num_top else None,
    )
    return sequence.request, token


def aborted(sequence: Sequence) -> tuple[Request, SampledToken]:
    """Return the final, tokenless record of a streamed sample that was aborted."""
    text, version = _certain_text(sequence), sequence.newest_version
    return sequence.request, SampledToken(sequence.index, text, None, 0.0, version, FinishReason.ABORT)


def refused(sequence: Sequence, serving: tuple[int, int]) -> Delivery:
    """Return a delivery that fails the request: weights `serving`, (epoch, version), give NaN or infinite logits."""
    request, (epoch, version) = sequence.request, serving
    error = NotFinite(
        f"the model's logits must be finite, got NaN or infinity for token {len(sequence.token_ids)} of choice "
        f"{sequence.index} after a prompt of {len(request.prompt_token_ids)} tokens, with weights {epoch}.{version}; "
        "serve a model that overflows float16 in bfloat16 or float32, or check the weights"
    )
    return Delivery(request, is_last=True, error=error)


def failed(request: Request, error: Exception) -> Delivery:
    """Return a delivery that fails the request, whose forward pass raised `error`."""
    reason = (str(error).strip().splitlines() or [""])[0][:300]
    return Delivery(
        request,
        is_last=True,
        error=ContractError(
            f"the engine failed in a forward pass with this request: {type(error).__name__}: {reason}; retry it, at "
            "another engine if there is one; this engine's log has the details"
        ),
    )


def _certain_text(sequence: Sequence) -> str:
    if sequence.text is None:
        return ""
    if sequence.finish_reason is not None:
        sequence.text.close()
    return sequence.text.take()
