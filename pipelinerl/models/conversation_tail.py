"""`ConversationTail`: the tokens that a chat template writes after an answer, up to the opening of the next one.

A continued conversation keeps its tokens exactly: sampled tokens stay as they were sampled, and only new messages are
rendered.

    sampled tokens … answer | <end of turn> new messages, opening of the assistant's turn
                            └───────────────────── the tail ─────────────────────────────┘

The tail comes from one rendering of `[user, assistant(MARK), *new messages]`: all text after the last mark. The code is
independent of the model. The difference of two renderings would be wrong, because templates may render earlier messages
differently once later ones follow. If a template writes no mark, or rejects the short conversation, there is no tail,
and the caller renders the whole conversation instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Final, final

from pipelinerl.errors import ModelError
from pipelinerl.models.control_tokens import Chat, ContentGuard, Render, Turn

#: Only letters and digits, which no template or tokenizer changes.
_MARK: Final = "Qz7answerQz7"
_ASKS: Final[Turn] = {"role": "user", "content": "a"}


class _NoTail(Exception):
    """The text after an answer cannot be separated in this template."""


@final
class ConversationTail:
    """The tails of one tokenizer and template.

    Args:
        guard: encodes rendered texts.
        render: renders a chat, as for `ContentGuard`.
        ends: spelling of each token that ends a sample, by id.
    """

    def __init__(self, guard: ContentGuard, render: Render, ends: Mapping[int, str]) -> None:
        self._guard = guard
        self._render = render
        self._ends = dict(ends)
        self._closings: dict[int, tuple[str, int]] = {}  # by the number of calls in the answer

    def encode(self, chat: Chat, first_new: int, *, last_id: int) -> list[int] | None:
        """Return token ids after the answer `chat.turns[first_new - 1]`, which ends with `last_id`; None without a
        tail.

        Raises:
            ModelError: a new message spells a control token, and the template's changes to it cannot be followed.
        """
        new = chat.turns[first_new:]
        mark = _unused_mark(new)
        answer = _marked(chat.turns[first_new - 1], mark)
        short = replace(chat, turns=[_ASKS, answer, *new])
        closing, before_end = self._closing(len(answer.get("tool_calls", ())))

        def begin(text: str) -> int:
            at = text.rfind(mark)
            start = at + len(mark)
            if at < 0 or not text.startswith(closing, start):
                raise _NoTail
            return start + before_end

        try:
            self._render(short, True)
        except ModelError:
            return None  # the whole conversation may still render
        try:
            ids = self._guard.encode_chat(short, begin=begin, first_row=first_new - 2)
        except _NoTail:
            return None
        return ids[1:] if last_id in self._ends and ids and ids[0] in self._ends else ids

    def reproduces_deployment(self, *, calls: int = 0) -> bool:
        """Return whether a continued conversation equals the template's rendering of the whole conversation.

        Args:
            calls: the number of tools that the answer calls; 0 means a text answer.
        """
        answer: Turn = {"role": "assistant", "content": "b"}
        replies: list[Turn] = [{"role": "user", "content": "c"}]
        if calls:
            answer["tool_calls"] = [_call(f"call{number}", {"a": "b"}) for number in range(calls)]
            answer["content"] = ""
            replies = [
                {"role": "tool", "content": "c", "name": "f", "tool_call_id": call["id"]}
                for call in answer["tool_calls"]
            ]
        try:
            opened = self._render(Chat(turns=[_ASKS, answer]), False)
            whole = self._render(Chat(turns=[_ASKS, answer, *replies]), True)
            short = self._render(Chat(turns=[_ASKS, _marked(answer, _MARK), *replies]), True)
        except ModelError:
            return False
        closing, before_end = self._closing(calls)
        at = short.rfind(_MARK)
        if at < 0 or not closing or closing not in opened:
            return at >= 0 and whole.endswith(short[at + len(_MARK) :])
        end = opened.rfind(closing) + before_end
        return whole == opened[:end] + short[at + len(_MARK) + before_end :]

    def _closing(self, calls: int) -> tuple[str, int]:
        if calls not in self._closings:
            self._closings[calls] = self._closing_after(calls)
        return self._closings[calls]

    def _closing_after(self, calls: int) -> tuple[str, int]:
        """Return the text between an answer and the end of its turn, including the end token.

        The second value is the number of characters before that token.
        """
        answer: Turn = {"role": "assistant", "content": "b"}
        if calls:
            answer["tool_calls"] = [_call(f"call{number}", {"a": "b"}) for number in range(calls)]
        try:
            text = self._render(Chat(turns=[_ASKS, _marked(answer, _MARK)]), False)
        except ModelError:
            return "", 0
        closing = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
        found = [(closing.find(end), end) for end in self._ends.values() if end in closing]
        if not found:
            return "", 0  # this template ends a turn without a token
        at, end = min(found)
        return closing[: at + len(end)], at


def _marked(answer: Turn, mark: str) -> Turn:
    """Return the answer with the mark as its texts. A template may write a call in place of the content."""
    marked = {**answer, "content": mark}
    marked.pop("reasoning_content", None)
    if calls := answer.get("tool_calls"):
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _marked_arguments(call["function"], mark)}}
            for call in calls
        ]
    return marked


def _marked_arguments(function: Mapping[str, Any], mark: str) -> Any:
    return mark if isinstance(function["arguments"], str) else {"a": mark}


def _call(name: str, arguments: Any) -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": "f", "arguments": arguments}}


def _unused_mark(turns: Sequence[Turn]) -> str:
    """Return a mark that no text of these turns contains."""
    text = "\n".join(each.value for each in Chat(turns=turns).texts())
    return next(mark for mark in (_MARK + "x" * more for more in count()) if mark not in text)
