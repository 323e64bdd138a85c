"""Anthropic's Messages API, `/v1/messages`, translated to chat completions.

| here | chat completion |
|---|---|
| `system`, a text or a list of blocks | the first message |
| a `tool_result` block | a message of the role `tool` |
| a `tool_use` block | a call of the assistant's message |
| a `thinking` block | `reasoning_content` |

Marks for caching are dropped. Settings of sampling and of thinking have no effect, since the recipe decides on them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pydantic_core import from_json

from inference_contract.errors import ContractError
from inference_contract.schemas import FinishReason, Usage, without_idle
from inference_contract.tools import ToolCall
from pipelinerl.plugins.episodes.agent_api import answer as api

#: Fields that are the same in a chat completion; the episode overrides those of sampling.
_SAME: Final = ("temperature", "top_p", "top_k", "thinking", "stream")
_KNOWN: Final = ("model", "messages", "system", "max_tokens", "stop_sequences", "tools", "tool_choice", *_SAME)
#: The edit of the context that changes nothing; Claude Code requests it.
_KEEP_THINKING: Final = {"type": "clear_thinking_20251015", "keep": "all"}
#: Fields dropped at null and at these values.
_IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "container": (), "context_management": ({}, {"edits": []}, {"edits": [_KEEP_THINKING]}), "fallbacks": ([],),
    "inference_geo": (),
    "mcp_servers": ([],), "output_config": ({},), "service_tier": ("auto", "standard_only"), "speed": ("standard",),
}  # fmt: skip
#: Fields that never change the answer.
_TAGS: Final = frozenset({"metadata", "cache_control", "diagnostics", "user_profile_id", "workspace_id"})
#: Fields of a tool that do not change the prompt.
_OF_TOOLS: Final = ("type", "name", "description", "input_schema", "strict", "cache_control", "eager_input_streaming")
#: Text that Claude Code puts before its system prompt for bookkeeping; it differs from one request to the next.
_BOOKKEEPING: Final = "x-anthropic-billing-header"
_STOP_REASONS: Final = {
    FinishReason.STOP: "end_turn",
    FinishReason.LENGTH: "max_tokens",
    FinishReason.TOOL_CALLS: "tool_use",
    FinishReason.ABORT: "end_turn",
}
_ERRORS: Final = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class MessagesCall:
    """A request to `/v1/messages`; satisfies `AgentCall`. Raises `InvalidRequest`."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        fields = {name: value for name, value in body.items() if name not in _TAGS}
        fields = without_idle(fields, _KNOWN, _IDLE)
        config = fields.get("output_config")
        if isinstance(config, dict) and config.keys() == {"effort"}:  # the only part that is supported
            del fields["output_config"]
            fields["reasoning_effort"] = config["effort"]
        api.refuse_unknown(fields, (*_KNOWN, "reasoning_effort"))
        self.chat: dict[str, Any] = {
            name: fields[name] for name in (*_SAME, "max_tokens", "reasoning_effort") if name in fields
        }
        if self.chat.get("thinking") == {"type": "disabled"}:
            del self.chat["thinking"]
        if "stop_sequences" in fields:
            self.chat["stop"] = fields["stop_sequences"]
        self.chat["messages"] = [*_system(fields.get("system")), *_messages(fields.get("messages"))]
        if tools := [
            _tool(each, f"tools.{place}") for place, each in enumerate(api.objects(fields.get("tools", []), "tools"))
        ]:
            self.chat["tools"] = tools
        if (choice := fields.get("tool_choice")) is not None:
            if not isinstance(choice, dict):
                raise api.refused("tool_choice", "must be an object")
            self.chat["tool_choice"] = choice.get("type")
            if choice.get("disable_parallel_tool_use"):
                self.chat["parallel_tool_calls"] = False
        self._id = api.new_id("msg")
        self._blocks, self._block = 0, ""  # blocks that have ended, and the type of the open one

    def whole(self, answer: api.AgentAnswer) -> dict[str, Any]:
        content: list[dict[str, Any]] = []
        if answer.thinking:
            content.append({"type": "thinking", "thinking": answer.thinking, "signature": self._id})
        if answer.text:
            content.append({"type": "text", "text": answer.text})
        content += [{**_tool_use(call), "input": _input(call)} for call in answer.calls]
        stop = _STOP_REASONS[answer.finish_reason]
        return self._message(content, stop_reason=stop, usage=_usage(answer.usage))

    def piece(self, piece: api.Piece) -> bytes:
        kind = "thinking" if piece.is_thinking else "text"
        opening = self._opening()
        if self._block != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if piece.is_thinking else {})
            opening += self._close() + self._start(kind, block)
        return opening + self._delta({"type": f"{kind}_delta", kind: piece.text})

    def end(self, answer: api.AgentAnswer) -> bytes:
        events = [self._opening(), self._close()]
        for call in answer.calls:
            events += [
                self._start("tool_use", {**_tool_use(call), "input": {}}),
                self._delta({"type": "input_json_delta", "partial_json": json.dumps(_input(call))}),
                self._close(),
            ]
        stop = {"stop_reason": _STOP_REASONS[answer.finish_reason], "stop_sequence": None}
        events.append(_event("message_delta", delta=stop, usage=_usage(answer.usage)))
        return b"".join([*events, _event("message_stop")])

    def broken(self, error: ContractError) -> bytes:
        return api.event(error_body(error, error.status), name="error")

    def _message(self, content: list[Any], *, stop_reason: str | None, usage: Mapping[str, int]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": api.MODEL,
            "content": content,
            "stop_reason": stop_reason,
            "stop_sequence": None,
            "usage": dict(usage),
        }

    def _opening(self) -> bytes:
        if self._blocks or self._block:
            return b""
        # The number of the prompt's tokens follows in `message_delta`: it is not known yet.
        unknown = _usage(Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0))
        return _event("message_start", message=self._message([], stop_reason=None, usage=unknown))

    def _start(self, kind: str, block: Mapping[str, Any]) -> bytes:
        self._block = kind
        return _event("content_block_start", index=self._blocks, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._blocks, delta=delta)

    def _close(self) -> bytes:
        if not self._block:
            return b""
        signed = self._delta({"type": "signature_delta", "signature": self._id}) if self._block == "thinking" else b""
        self._blocks, self._block, ended = self._blocks + 1, "", self._blocks
        return signed + _event("content_block_stop", index=ended)


def error_body(error: ContractError, status: int) -> dict[str, Any]:
    """Return Anthropic's body of an error response."""
    kind = _ERRORS.get(status, "invalid_request_error" if status == 400 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(kind: str, **fields: Any) -> bytes:
    return api.event({"type": kind, **fields}, name=kind)


def _usage(usage: Usage) -> dict[str, int]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    return {"input_tokens": usage.prompt_tokens, "output_tokens": usage.completion_tokens, **cached}


def _tool_use(call: ToolCall) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id, "name": call.function.name}


def _input(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments as the object that Anthropic's clients expect, even if an engine sends other text."""
    try:
        arguments = from_json(call.function.arguments)
    except ValueError:
        arguments = call.function.arguments
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}


# --- reading requests -------------------------------------------------------------------------------------------------


def _system(system: Any) -> list[dict[str, Any]]:
    if system is None:
        return []
    if isinstance(system, list):
        system = [
            each for each in system if not (isinstance(each, dict) and str(each.get("text")).startswith(_BOOKKEEPING))
        ]
    text = api.text_of(system, ("text",), "system")
    return [{"role": "system", "content": text}] if text else []


def _messages(value: Any) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for place, message in enumerate(api.objects(value, "messages")):
        where = f"messages.{place}"
        api.refuse_unknown(message, ("role", "content"), f"{where}.")
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            messages.append(_assistant(content, f"{where}.content"))
        elif role in ("user", "system"):
            messages += _given(role, content, f"{where}.content")
        else:
            raise api.refused(f"{where}.role", "must be user or assistant")
    if messages and messages[-1]["role"] == "assistant":
        raise api.refused("messages", "the last message must not be the assistant's; the model begins its own answer")
    return messages


def _assistant(content: Any, where: str) -> dict[str, Any]:
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else api.objects(content, where)
    texts, thinking, calls = [], [], []
    for place, block in enumerate(blocks):
        at = f"{where}.{place}"
        match block.get("type"):
            case "text":
                texts.append(api.text_in(block, "text", at))
            case "thinking":
                thinking.append(api.text_in(block, "thinking", at))
            case "redacted_thinking":
                pass
            case "tool_use":
                value = block.get("input")
                if not isinstance(value, dict):
                    raise api.refused(f"{at}.input", "must be an object")
                function = {"name": api.text_in(block, "name", at), "arguments": json.dumps(value, ensure_ascii=False)}
                calls.append({"id": api.text_in(block, "id", at), "type": "function", "function": function})
            case _:
                raise api.refused(f"{at}.type", "must be text, thinking or tool_use; leave the block out")
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thinking):
        message["reasoning_content"] = "\n".join(thinking)
    return {**message, "tool_calls": calls} if calls else message


def _given(role: str, content: Any, where: str) -> list[dict[str, Any]]:
    """Return the messages of a user's blocks, in their order: one for each tool's result, and one for texts between."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else api.objects(content, where)
    messages: list[dict[str, Any]] = []
    for place, block in enumerate(blocks):
        at = f"{where}.{place}"
        match block.get("type"):
            case "text":
                text = api.text_in(block, "text", at)
                if messages and messages[-1]["role"] == role:
                    messages[-1]["content"] += f"\n{text}"
                else:
                    messages.append({"role": role, "content": text})
            case "tool_result":
                result = block.get("content")
                text = "" if result is None else api.text_of(result, ("text",), f"{at}.content")
                messages.append(
                    {"role": "tool", "tool_call_id": api.text_in(block, "tool_use_id", at), "content": text}
                )
            case _:
                raise api.refused(
                    f"{at}.type", "must be text or tool_result, since the model reads only text; leave it out"
                )
    if not messages:
        raise api.refused(where, "must not be empty")
    return messages


def _tool(each: Mapping[str, Any], where: str) -> dict[str, Any]:
    if each.get("type") not in (None, "custom"):
        raise api.refused(f"{where}.type", "only the agent's own tools are supported, of the type custom; leave it out")
    api.refuse_unknown(each, _OF_TOOLS, f"{where}.")
    return api.tool(each.get("name"), each.get("description"), each.get("input_schema"))
