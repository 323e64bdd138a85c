"""An answer as agents see it, whole or in pieces while it is sampled; `AgentCall`, what each API translates it to.

    engine: the text so far ─▶ `AnswerReader` ─▶ pieces of thinking and of text ─▶ `AgentCall` ─▶ events of the API

Token ids, log-probs and spans stay in the gateway. Thinking ends at the first `</think>`; its opening tag may be
missing, since some templates put it into the prompt.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from inference_contract.errors import ContractError, InvalidRequest
from inference_contract.schemas import ChatCompletion, FinishReason, Usage
from inference_contract.tools import ToolCall
from pipelinerl.answers.thinking import split

#: The name of the model in every answer.
MODEL: Final = "policy"
_NUMBERS: Final = itertools.count(1)
_OPENING: Final = "<think>"
_CLOSING: Final = "</think>"


def split_thinking(content: str) -> tuple[str | None, str]:
    """Return an answer's thinking and its text. Thinking is None if there is none; it may be cut before its end."""
    head, tag, rest = content.partition(_CLOSING)
    if not tag and not content.lstrip().startswith(_OPENING):
        return None, content
    return head.lstrip().removeprefix(_OPENING).strip(), rest.lstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentAnswer:
    """A whole answer; `content` is what the model wrote, apart from its calls."""

    content: str
    calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    usage: Usage

    @classmethod
    def of(cls, completion: ChatCompletion) -> AgentAnswer:
        """Take the answer from an engine's completion of one choice."""
        (choice,) = completion.choices
        calls = tuple(choice.message.tool_calls or ())
        return cls(
            content=choice.message.content, calls=calls, finish_reason=choice.finish_reason, usage=completion.usage
        )

    @property
    def thinks_without_tag(self) -> bool:
        """True if the answer begins with thinking whose opening tag is in the prompt."""
        return _CLOSING in self.content and not self.content.lstrip().startswith(_OPENING)

    @property
    def thinking(self) -> str | None:
        return split(self.content)[0] or None

    @property
    def text(self) -> str:
        return split(self.content)[1]


class AnswerChanged(Exception):
    """The answer no longer begins with the pieces already sent, since it was sampled again on another engine."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The next part of an answer's thinking or, if not `is_thinking`, of its text; never empty."""

    is_thinking: bool
    text: str


class AnswerReader:
    """The pieces of one answer, from its growing content.

    Thinking whose opening tag is in the prompt cannot be recognised before its closing tag. With `thinks`, every answer
    is taken to begin with thinking. Otherwise such thinking is sent as text, tag included.
    """

    def __init__(self, *, thinks: bool) -> None:
        self._thinks = thinks
        self._splits: bool | None = None  # True if the answer begins with thinking; None while that is unknown
        self._sent = {True: "", False: ""}

    def more(self, content: str) -> list[Piece]:
        """Return the pieces that are certain in `content`, the content so far. Raises `AnswerChanged`."""
        begun = content.lstrip()
        if self._splits is None and len(begun) < len(_OPENING) and _OPENING.startswith(begun):
            return []
        thinking, text = self.shown(content)
        if _CLOSING not in content:
            thinking = thinking or ""
            sizes = range(len(_CLOSING) - 1, 0, -1)
            begun_tag = next((size for size in sizes if thinking.endswith(_CLOSING[:size])), 0)
            thinking = thinking[: len(thinking) - begun_tag].rstrip()
        return [*self._next(True, thinking or ""), *self._next(False, text)]

    def rest(self, content: str) -> list[Piece]:
        """Return the last pieces, given the whole content. Raises `AnswerChanged`."""
        thinking, text = self.shown(content)
        pieces = [*self._next(True, thinking or ""), *self._next(False, text)]
        if self._sent != {True: thinking or "", False: text}:
            raise AnswerChanged
        return pieces

    def shown(self, content: str) -> tuple[str | None, str]:
        """Return the thinking and the text of this content as the pieces have them."""
        if self._splits is None:
            self._splits = self._thinks or split_thinking(content)[0] is not None
        if not self._splits:
            return None, content
        thinking, text = split_thinking(content)
        return (text.strip(), "") if thinking is None else (thinking, text)

    def _next(self, is_thinking: bool, known: str) -> list[Piece]:
        sent = self._sent[is_thinking]
        if not known.startswith(sent):
            if sent.startswith(known):
                return []  # another engine has taken over, and sends the text from its beginning
            raise AnswerChanged
        self._sent[is_thinking] = known
        return [Piece(is_thinking, known[len(sent) :])] if len(known) > len(sent) else []


class AgentCall(Protocol):
    """One request of an agent in one API, and the translation of its answer. The methods of a stream keep state."""

    chat: dict[str, Any]
    """The body of the same request in OpenAI's chat API."""

    def whole(self, answer: AgentAnswer) -> dict[str, Any]:
        """Return the body of the response."""
        ...

    def piece(self, piece: Piece) -> bytes:
        """Return the events of a streamed response for the next piece, with those that open the stream."""
        ...

    def end(self, answer: AgentAnswer) -> bytes:
        """Return the last events, after all pieces, with the answer's calls."""
        ...

    def broken(self, error: ContractError) -> bytes:
        """Return the event for an error after the stream has begun."""
        ...


def new_id(prefix: str) -> str:
    """Return an id of the form that clients of these APIs know; no other in this process is equal."""
    return f"{prefix}_{next(_NUMBERS):024x}"


def event(data: Mapping[str, Any], *, name: str = "") -> bytes:
    """Return a server-sent event; its JSON escapes everything outside ASCII."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data)}\n\n".encode()


# --- reading requests -------------------------------------------------------------------------------------------------


def refuse_unknown(fields: Mapping[str, Any], known: Sequence[str], where: str = "") -> None:
    """Raise `InvalidRequest` for a field that is neither known nor without effect."""
    for name in fields:
        if name not in known:
            raise refused(f"{where}{name}", "the gateway does not know it, or not with this value; leave it out")


def refused(param: str, reason: str) -> InvalidRequest:
    """Return the error for the field `param`."""
    return InvalidRequest(f"{param}: {reason}", param=param)


def text_of(content: Any, types: Sequence[str], where: str) -> str:
    """Return the text of a message's content: a text, or a list of parts of `types`, which are joined with newlines."""
    if isinstance(content, str):
        return content
    texts = []
    for place, part in enumerate(objects(content, where)):
        if part.get("type") not in types or not isinstance(part.get("text"), str):
            raise refused(f"{where}.{place}", f"must be text, of the type {' or '.join(types)}; leave it out")
        texts.append(part["text"])
    return "\n".join(texts)


def objects(value: Any, where: str) -> list[dict[str, Any]]:
    """Return `value` if it is a list of objects. Raises `InvalidRequest`."""
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise refused(where, "must be a list of objects")
    return value


def text_in(fields: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in a field. Raises `InvalidRequest`."""
    if not isinstance(fields.get(name), str):
        raise refused(f"{where}.{name}", "must be a text")
    return str(fields[name])


def tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    """Return a tool in the form of OpenAI's chat API, which the engine's schema validates."""
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


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
        return self._chunk({"reasoning_content" if piece.is_thinking else "content": piece.text})

    def end(self, answer: AgentAnswer) -> bytes:
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
