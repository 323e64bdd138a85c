"""OpenAI's chat completions API, in which the gateway records episodes: requests stay as they are."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from inference_contract.errors import ContractError
from pipelinerl.plugins.episodes.agent_api.answer import MODEL, AgentAnswer, Piece, event, new_id


class ChatCall:
    """A request to `/v1/chat/completions`; satisfies `AgentCall`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        self.chat = dict(body)
        options = body.get("stream_options")
        self._includes_usage = isinstance(options, dict) and options.get("include_usage") is True
        self._id, self._created, self._is_open = new_id("chatcmpl"), int(time.time()), False

    def whole(self, answer: AgentAnswer) -> dict[str, Any]:
        """Return OpenAI's completion object; thinking is in `reasoning_content`."""
        message: dict[str, Any] = {"role": "assistant", "content": answer.text}
        if answer.thinking is not None:
            message["reasoning_content"] = answer.thinking
        if answer.calls:
            message["content"] = answer.text or None
            message["tool_calls"] = [call.model_dump() for call in answer.calls]
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason.value, "logprobs": None}
        return {**self._head("chat.completion"), "choices": [choice], "usage": answer.usage.model_dump()}

    def piece(self, piece: Piece) -> bytes:
        """Return a chunk with the next thinking or text."""
        return self._chunk({"reasoning_content" if piece.is_thinking else "content": piece.text})

    def end(self, answer: AgentAnswer) -> bytes:
        """Return a chunk for each call, the one with the finish reason, the usage if requested, and the end mark."""
        calls = [{"index": place, **call.model_dump()} for place, call in enumerate(answer.calls)]
        chunks = [self._chunk({"tool_calls": [call]}) for call in calls]
        chunks.append(self._chunk({}, finish_reason=answer.finish_reason.value))
        if self._includes_usage:
            usage = answer.usage.model_dump()
            chunks.append(event({**self._head("chat.completion.chunk"), "choices": [], "usage": usage}))
        return b"".join([*chunks, b"data: [DONE]\n\n"])

    def broken(self, error: ContractError) -> bytes:
        """Return OpenAI's error as an event, which its client raises."""
        return event(error.to_wire())

    def _chunk(self, delta: dict[str, Any], *, finish_reason: str | None = None) -> bytes:
        if not self._is_open:
            self._is_open = True
            delta = {"role": "assistant", **({"content": ""} if not delta else {}), **delta}
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
        return event({**self._head("chat.completion.chunk"), "choices": [choice]})

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": MODEL}
