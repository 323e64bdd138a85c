"""`ConversationTail`: the tokens that a chat template writes after an answer, up to the opening of the next one.

A conversation is continued to the token: what was sampled stays as it was sampled, and only what is new is rendered.

    sampled tokens … answer | <end of turn> new messages, opening of the assistant's turn
                            └───────────────────── the tail ─────────────────────────────┘

The tail comes from one rendering of `[user, assistant(MARK), *new messages]`: all text after the last mark. No code
here knows a model. A difference of two renderings would be wrong, for templates may render earlier messages differently
once later ones follow. Where a template writes no mark, or refuses the short conversation, there is no tail: the caller
renders the whole conversation instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import count
from typing import Any, Final, final

from pipelinerl.errors import ModelError
from pipelinerl.models.control_tokens import ContentGuard, Render, Turn

#: Letters and digits alone: no template or tokenizer changes them.
_MARK: Final = "Qz7answerQz7"
_ASKS: Final[Turn] = {"role": "user", "content": "a"}


class _NoTail(Exception):
    """The template does not write what follows an answer in a way that can be cut off."""


@final
class ConversationTail:
    """The tails of one tokenizer and template.

    Args:
        guard: encodes rendered texts.
        render: the template's text, as `ContentGuard` takes it.
        ends: spelling of each token that ends a sample, by id.
    """

    def __init__(self, guard: ContentGuard, render: Render, ends: Mapping[int, str]) -> None:
        self._guard = guard
        self._render = render
        self._ends = dict(ends)

    def encode(
        self, turns: Sequence[Turn], first_new: int, *, last_id: int, also: Mapping[str, Any]
    ) -> list[int] | None:
        """Token ids after the answer `turns[first_new - 1]`, whose last token is `last_id`; None if there is no tail.

        Raises:
            ModelError: a new message spells a control token where the template cannot be followed.
        """
        new = turns[first_new:]
        mark = _unused_mark(turn["content"] for turn in new)
        short = [_ASKS, {**turns[first_new - 1], "content": mark}, *new]

        def begin(text: str) -> int:
            at = text.rfind(mark)
            start = at + len(mark)
            if at < 0 or not text.startswith(self._closing, start):
                raise _NoTail
            return start + self._before_end

        try:
            self._render(short, True, also)
        except ModelError:
            return None  # the whole conversation may still render
        try:
            ids = self._guard.encode_chat(short, also, begin=begin, first_row=first_new - 2)
        except _NoTail:
            return None
        return ids[1:] if last_id in self._ends and ids and ids[0] in self._ends else ids

    @property
    def reproduces_deployment(self) -> bool:
        """Whether a text conversation that is continued this way is what the template renders as a whole."""
        question, answer, reply = _ASKS, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}
        try:
            opening = self._render([question], True, {})
            whole = self._render([question, answer, reply], True, {})
            short = self._render([question, {**answer, "content": _MARK}, reply], True, {})
        except ModelError:
            return False
        return whole == opening + answer["content"] + short[short.rfind(_MARK) + len(_MARK) :]

    @cached_property
    def _closing(self) -> str:
        """What the template writes between an answer and the end of its turn, the end token included."""
        try:
            text = self._render([_ASKS, {"role": "assistant", "content": _MARK}], False, {})
        except ModelError:
            return ""
        closing = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
        found = [(closing.find(end), end) for end in self._ends.values() if end and end in closing]
        if not found:
            return ""  # this template ends a turn without a token
        at, end = min(found)
        return closing[: at + len(end)]

    @cached_property
    def _before_end(self) -> int:
        """Characters of the closing before its end token."""
        return min((self._closing.find(end) for end in self._ends.values() if end and end in self._closing), default=0)


def _unused_mark(contents: Iterable[str]) -> str:
    """A mark that no content spells."""
    text = "\n".join(contents)
    return next(mark for mark in (_MARK + "x" * more for more in count()) if mark not in text)
