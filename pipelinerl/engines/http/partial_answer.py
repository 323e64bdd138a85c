"""`PartialAnswer`: a growing chat completion, which survives failures of the engines that sample it. Pure: no I/O.

    request ─▶ engine a: chunk, chunk, dies ─▶ `rest` ─▶ engine b: chunk, chunk, end ─▶ `completion`

Received tokens are kept, with their log-probs and versions. The next engine is asked only for the missing part of each
sample, after the exact prompt tokens of the first engine. Version spans follow the tokens, so the next engine may serve
an older version than the previous one. Routed experts, if requested, follow the tokens too; those of the prompt come
from the first engine.

All tokens of an answer have the epoch of the weights that began it. Weights of another epoch may come from a diverging
training history, so `take` rejects a continuation by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from inference_contract.routed_experts import RoutedExperts
from inference_contract.schemas import (
    AnswerPrefix,
    AssistantMessage,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    Choice,
    ChunkChoice,
    FinishReason,
    Span,
    StreamOptions,
    Usage,
)
from inference_contract.tools import FunctionCall, ToolCall
from pipelinerl.errors import EngineUnreachable


@dataclass(slots=True)
class _Sample:
    """The part of one sample that has been received."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    routed: list[RoutedExperts] = field(default_factory=list)
    text: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    def take(self, part: ChunkChoice, *, url: str, routed: bool) -> None:
        token_ids, logprobs, spans = part.token_ids or [], part.token_logprobs or [], part.version_spans or []
        if not len(token_ids) == len(logprobs) == sum(count for _, count in spans) or self.finish_reason is not None:
            raise EngineUnreachable(
                f"{url} must stream as many log-probs as tokens, version spans over all of them, and nothing after the "
                f"finish reason; choice {part.index} came with {len(token_ids)} tokens, {len(logprobs)} log-probs and "
                f"spans {spans}. Run `pipelinerl conformance engine URL` against it"
            )
        if routed and token_ids:
            self._take_routing(part, len(token_ids), url=url)
        self.token_ids += token_ids
        self.logprobs += logprobs
        for version, count in spans:
            if self.spans and self.spans[-1][0] == version:
                self.spans[-1] = version, self.spans[-1][1] + count
            else:
                self.spans.append((version, count))
        self.text += part.delta.content or ""
        self.calls += [
            ToolCall(
                id=call.id or "",
                function=FunctionCall(name=call.function.name or "", arguments=call.function.arguments or ""),
            )
            for call in part.delta.tool_calls or ()
        ]
        self.finish_reason = part.finish_reason

    def choice(self, index: int) -> Choice:
        """Return the finished sample as a choice of a whole completion."""
        assert self.finish_reason is not None
        return Choice(  # validation is faster than `model_construct` up to hundreds of tokens
            index=index,
            message=AssistantMessage(content=self.text, tool_calls=self.calls or None),
            finish_reason=self.finish_reason,
            token_ids=self.token_ids,
            token_logprobs=self.logprobs,
            version_spans=self.spans,
            routed_experts=RoutedExperts.joined(self.routed) if self.routed else None,
        )

    def _take_routing(self, part: ChunkChoice, num_tokens: int, *, url: str) -> None:
        came = part.routed_experts
        like = self.routed[0] if self.routed else came
        if came is None or like is None or came.num_tokens != num_tokens or not came.is_like(like):
            raise EngineUnreachable(
                f"{url} must stream the routed experts of each new token, of one model, when return_routed_experts is "
                f"set; choice {part.index} came with {num_tokens} tokens and experts of shape {came and came.shape}"
            )
        self.routed.append(came)


@final
class PartialAnswer:
    """The part of the answer to `request` that has been received. Engines are asked to send a chunk every
    `interval_s`.
    """

    def __init__(self, request: ChatCompletionRequest, *, interval_s: float) -> None:
        self._request = request
        self._options = StreamOptions(interval_s=interval_s)
        self._last: ChatCompletionChunk | None = None
        self._prompt: list[int] | None = None
        self._prompt_routed: RoutedExperts | None = None
        self._samples: dict[int, _Sample] = {index: _Sample() for index in range(request.n)}
        self._handed_over = 0  # tokens received before the current engine took over
        self.tokens_kept = 0
        """Tokens of the answer from engines that did not finish it."""
        self.tokens_resampled = 0
        """Tokens that arrived and were dropped."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens received."""
        return sum(len(sample.token_ids) for sample in self._samples.values())

    @property
    def is_whole(self) -> bool:
        """True if every sample has ended."""
        return all(sample.finish_reason is not None for sample in self._samples.values())

    def rest(self) -> ChatCompletionRequest:
        """Return the request for the next engine: the original request, or one for the tokens that are still missing.

        Text received so far is dropped, because the next engine sends the text of the whole answer at its end.
        """
        changes: dict[str, object] = {"stream": True, "stream_options": self._options}
        if self._prompt is not None:
            missing = {index: sample for index, sample in self._samples.items() if sample.finish_reason is None}
            for sample in missing.values():
                sample.text = ""
            prefixes = [AnswerPrefix(index=i, token_ids=list(sample.token_ids)) for i, sample in missing.items()]
            changes |= {"messages": None, "prompt": None, "prompt_token_ids": self._prompt}
            changes |= {"n": len(missing), "prefixes": prefixes}
            changes |= {"continue_token_ids": None, "continue_from": None}  # the prompt's tokens are already known
        return self._request.model_copy(update=changes)

    def take(self, chunk: ChatCompletionChunk, *, url: str) -> bool:
        """Add a chunk from the engine at `url`; return False if the chunk has another epoch than the earlier chunks.

        Raises:
            EngineUnreachable: the chunk does not fit the request.
        """
        if self._last is not None and chunk.epoch != self._last.epoch:
            return False
        if self._prompt is None:
            if chunk.prompt_token_ids is None:
                raise EngineUnreachable(f"{url} must begin a stream with prompt_token_ids when return_token_ids is set")
            self._prompt, self._prompt_routed = chunk.prompt_token_ids, chunk.prompt_routed_experts
        for part in chunk.choices:
            if part.index not in self._samples:
                raise EngineUnreachable(f"{url} streams choice {part.index}, which was not requested")
            self._samples[part.index].take(part, url=url, routed=self._request.return_routed_experts)
        self._last = chunk
        return True

    def hand_over(self) -> None:
        """Record that the current engine has stopped; its tokens are kept for the next one."""
        self.tokens_kept += self.num_tokens - self._handed_over
        self._handed_over = self.num_tokens

    def forget(self) -> None:
        """Drop the received tokens, so that the next engine starts over."""
        self.tokens_resampled += self.num_tokens
        self.tokens_kept = self._handed_over = 0
        self._samples = {index: _Sample() for index in self._samples}
        self._last = self._prompt = self._prompt_routed = None

    def completion(self) -> ChatCompletion:
        """Return the whole answer, as one engine would have sent it. Every sample must have ended."""
        last, prompt, tokens = self._last, self._prompt, self.num_tokens
        assert last is not None and prompt is not None
        return ChatCompletion(
            id=last.id,
            created=last.created,
            model=last.model,
            choices=[sample.choice(index) for index, sample in self._samples.items()],
            usage=Usage(prompt_tokens=len(prompt), completion_tokens=tokens, total_tokens=len(prompt) + tokens),
            prompt_token_ids=prompt,
            prompt_routed_experts=self._prompt_routed,
            model_version=max((version for s in self._samples.values() for version, _ in s.spans), default=0),
            epoch=last.epoch,
        )
