"""OpenAI's Responses API, `/v1/responses`, translated to chat completions.

| here | chat completion |
|---|---|
| `instructions` | the first message |
| `reasoning`, assistant `message` and `function_call` items in a row | one assistant message |
| a `function_call_output` item | a message of the role `tool` |
| `previous_response_id` | the messages of that response's request and answer, kept until the episode ends |

Settings of sampling and of reasoning have no effect, since the recipe decides on them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Final

from inference_contract.errors import ContractError
from inference_contract.schemas import FinishReason, Usage, without_idle
from inference_contract.tools import ToolCall
from pipelinerl.plugins.episodes.agent_api import answer as api

#: The messages before and with the answer, by the response's id.
History = MutableMapping[str, Sequence[dict[str, Any]]]

#: Fields that are the same in a chat completion; the episode overrides those of sampling.
_SAME: Final = ("temperature", "top_p", "stream", "tool_choice", "parallel_tool_calls", "verbosity")
_KNOWN: Final = (
    "model", "input", "instructions", "tools", "max_output_tokens", "previous_response_id", "reasoning", "text", *_SAME,
)  # fmt: skip
#: Fields dropped at null and at these values.
_IDLE: Final[Mapping[str, tuple[Any, ...]]] = {
    "background": (False,), "context_management": ([],), "conversation": (),
    "include": ([], ["reasoning.encrypted_content"]), "max_tool_calls": (), "moderation": (), "prompt": (),
    "service_tier": ("auto", "default"), "stream_options": ({}, {"include_obfuscation": False}), "tools": ([],),
    "top_logprobs": (0,), "truncation": ("disabled",),
}  # fmt: skip
#: Fields that never change the answer.
_TAGS: Final = frozenset(
    {
        "client_metadata", "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
        "safety_identifier", "store", "user",
    }
)  # fmt: skip
_TEXTS: Final = ("input_text", "output_text", "text")
_OF_TOOLS: Final = ("type", "name", "description", "parameters", "strict", "defer_loading", "allowed_callers")


#: The further field of a part's events, by the type of its item.
_LOGPROBS: Final[Mapping[str, dict[str, Any]]] = {"reasoning": {}, "message": {"logprobs": []}}


class ResponsesCall:
    """A request to `/v1/responses`; satisfies `AgentCall`. Raises `InvalidRequest`."""

    def __init__(self, body: Mapping[str, Any], history: History) -> None:
        fields = {name: value for name, value in body.items() if name not in _TAGS}
        fields = without_idle(fields, _KNOWN, _IDLE)
        api.refuse_unknown(fields, _KNOWN)
        self.chat: dict[str, Any] = {name: fields[name] for name in _SAME if name in fields}
        if fields.get("reasoning"):
            self.chat["reasoning_effort"] = fields["reasoning"]
        if "max_output_tokens" in fields:
            self.chat["max_tokens"] = fields["max_output_tokens"]
        self.chat |= _text_format(fields.get("text"))
        if tools := [
            _tool(each, f"tools.{at}") for at, each in enumerate(api.objects(fields.get("tools", []), "tools"))
        ]:
            self.chat["tools"] = tools
        earlier = fields.get("previous_response_id")
        if earlier is not None and (not isinstance(earlier, str) or earlier not in history):
            raise api.refused("previous_response_id", "this episode has no such response; send its items in input")
        self._messages = [*([] if earlier is None else history[earlier]), *_messages(fields.get("input"))]
        instructions = fields.get("instructions")
        if instructions is not None and not isinstance(instructions, str):
            raise api.refused("instructions", "must be a text")
        first = [{"role": "system", "content": instructions}] if instructions else []
        self.chat["messages"] = [*first, *self._messages]
        self._fields, self._history = fields, history
        self._id, self._created = api.new_id("resp"), int(time.time())
        self._sequence = 0
        self._output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def whole(self, answer: api.AgentAnswer) -> dict[str, Any]:
        """Return OpenAI's response object, and keep its messages for `previous_response_id`."""
        output = [
            _item(kind, text) for kind, text in (("reasoning", answer.thinking), ("message", answer.text)) if text
        ]
        return self._ended(answer, [*output, *map(_call, answer.calls)])

    def piece(self, piece: api.Piece) -> bytes:
        kind, part = ("reasoning", "reasoning_text") if piece.is_thinking else ("message", "output_text")
        events = [self._opening()]
        if self._open is None or self._open["type"] != kind:
            events.append(self._close())
            self._open = item = _item(kind, "")
            events.append(self._event("output_item.added", item={**item, "content": [], "status": "in_progress"}))
            events.append(self._of_part("content_part.added", part=dict(item["content"][0])))
        assert self._open is not None
        self._open["content"][0]["text"] += piece.text
        return b"".join([*events, self._of_part(f"{part}.delta", delta=piece.text, **_LOGPROBS[kind])])

    def end(self, answer: api.AgentAnswer) -> bytes:
        events = [self._opening(), self._close()]
        for call in answer.calls:
            item = _call(call)
            added = self._event("output_item.added", item={**item, "arguments": "", "status": "in_progress"})
            arguments = {"item_id": item["id"], "output_index": len(self._output)}
            events += [
                added,
                self._event("function_call_arguments.delta", **arguments, delta=item["arguments"]),
                self._event(
                    "function_call_arguments.done", **arguments, arguments=item["arguments"], name=item["name"]
                ),
                self._done(item),
            ]
        response = self._ended(answer, self._output)
        return b"".join([*events, self._event(str(response["status"]), response=response)])

    def broken(self, error: ContractError) -> bytes:
        failure = {"code": "server_error", "message": error.message}
        response = {**self._response("failed", self._output), "error": failure}
        return self._opening() + self._event("failed", response=response)

    def _ended(self, answer: api.AgentAnswer, output: list[dict[str, Any]]) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            said["tool_calls"] = [call.model_dump() for call in answer.calls]
        self._history[self._id] = [*self._messages, said]
        is_cut = answer.finish_reason is FinishReason.LENGTH
        response = self._response("incomplete" if is_cut else "completed", output)
        response["incomplete_details"] = {"reason": "max_output_tokens"} if is_cut else None
        return {**response, "usage": _usage(answer.usage)}

    def _response(self, status: str, output: Sequence[dict[str, Any]]) -> dict[str, Any]:
        given = self._fields
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "metadata": {},
            "model": api.MODEL,
            "output": list(output),
            "parallel_tool_calls": True,
            "previous_response_id": given.get("previous_response_id"),
            "temperature": None,
            "text": {"format": {"type": "text"}},
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": None,
            "usage": None,
        }

    def _opening(self) -> bytes:
        if self._sequence:
            return b""
        response = self._response("in_progress", [])
        return self._event("created", response=response) + self._event("in_progress", response=response)

    def _close(self) -> bytes:
        item = self._open
        if item is None:
            return b""
        part = item["content"][0]
        ended = self._of_part(f"{part['type']}.done", text=part["text"], **_LOGPROBS[item["type"]])
        ended += self._of_part("content_part.done", part=part)
        self._open = None
        return ended + self._done(item)

    def _done(self, item: dict[str, Any]) -> bytes:
        done = self._event("output_item.done", item=item)
        self._output.append(item)
        return done

    def _of_part(self, kind: str, **fields: Any) -> bytes:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(kind, **place, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind, number = f"response.{kind}", self._sequence
        self._sequence += 1
        if kind.startswith("response.output_item"):
            fields["output_index"] = len(self._output)
        return api.event({"type": kind, "sequence_number": number, **fields}, name=kind)


def _item(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {
            "id": api.new_id("rs"),
            "type": kind,
            "summary": [],
            "content": [{"type": "reasoning_text", "text": text}],
        }
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"id": api.new_id("msg"), "type": kind, "status": "completed", "role": "assistant", "content": [part]}


def _call(call: ToolCall) -> dict[str, Any]:
    function = {"call_id": call.id, "name": call.function.name, "arguments": call.function.arguments}
    return {"id": api.new_id("fc"), "type": "function_call", "status": "completed", **function}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


# --- reading requests -------------------------------------------------------------------------------------------------


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the messages of the items; consecutive parts of one answer become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for place, item in enumerate(api.objects(given, "input")):
        where = f"input.{place}"
        kind = item.get("type", "message")
        if kind == "function_call_output":
            output = api.text_of(item.get("output"), _TEXTS, f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": api.text_in(item, "call_id", where), "content": output})
        elif kind == "message" and item.get("role") != "assistant":
            content = api.text_of(item.get("content"), _TEXTS, f"{where}.content")
            messages.append({"role": item.get("role"), "content": content})
        elif kind in ("message", "reasoning", "function_call"):
            _add_to_answer(messages, kind, item, where)
        elif kind == "item_reference":
            raise api.refused(f"{where}.type", "items are not stored; send the item itself, or previous_response_id")
        else:
            known = "message, reasoning, function_call or function_call_output"
            raise api.refused(f"{where}.type", f"must be {known}; leave it out")
    return messages


def _add_to_answer(messages: list[dict[str, Any]], kind: str, item: Mapping[str, Any], where: str) -> None:
    """Add an item to the last message if that is the answer's, and has no later part yet; else begin a message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    is_same = last is not None and (
        kind == "function_call" or (not last.get("tool_calls") and not last["content"] and kind == "message")
    )
    if last is None or not is_same:
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if kind == "function_call":
        function = {"name": api.text_in(item, "name", where), "arguments": api.text_in(item, "arguments", where)}
        call = {"id": api.text_in(item, "call_id", where), "type": "function", "function": function}
        last.setdefault("tool_calls", []).append(call)
    elif kind == "message":
        last["content"] = api.text_of(item.get("content"), _TEXTS, f"{where}.content")
    elif thinking := api.text_of(item.get("content") or [], ("reasoning_text", "text"), f"{where}.content"):
        last["reasoning_content"] = thinking


def _tool(each: Mapping[str, Any], where: str) -> dict[str, Any]:
    if each.get("type") != "function":
        raise api.refused(
            f"{where}.type", "only the agent's own tools are supported, of the type function; leave it out"
        )
    api.refuse_unknown(each, _OF_TOOLS, f"{where}.")
    return api.tool(each.get("name"), each.get("description"), each.get("parameters"))


def _text_format(text: Any) -> dict[str, Any]:
    if text is None:
        return {}
    if not isinstance(text, dict):
        raise api.refused("text", "must be an object")
    api.refuse_unknown(text, ("format", "verbosity"), "text.")
    verbosity = {"verbosity": text["verbosity"]} if text.get("verbosity") is not None else {}
    form = text.get("format")
    if form is None or form == {"type": "text"}:
        return verbosity
    if not isinstance(form, dict):
        raise api.refused("text.format", "must be an object")
    if form.get("type") != "json_schema":
        return {**verbosity, "response_format": form}
    schema = {name: value for name, value in form.items() if name != "type" and value is not None}
    return {**verbosity, "response_format": {"type": "json_schema", "json_schema": schema}}
