"""`ContentGuard`: encodes a chat so that its template can write control tokens, but its messages' contents cannot.

`ConversationTail` continues such a chat after an answer. A control token is an added token that structures a
conversation. There are two kinds:

    structural   a token that is flagged as special, ends a sample, or frames a plain user message in the template.
                 No content may contain one, whatever its role.
    inner        any other added token that the template mentions (Qwen's `<think>`, `<tool_call>`, `<tool_response>`).
                 Contents of `user` and `tool` are data and may not contain one. Those of `system` and `assistant` may:
                 the operator writes the first, the model itself samples such tokens in the second, and few-shot
                 answers must show it what to sample.

All other added tokens are ordinary vocabulary for every role. Control text that is no added token (Llama 2's `[INST]`)
cannot be distinguished from data by its tokens, in any implementation.

A chat whose texts spell no control token gets the tokenizer's own ids of the rendered text. Otherwise the guard locates
the spellings in the texts. It renders the template again with the first character of each spelling replaced by a
private-use one; all other characters of the result must be the same. The text is then encoded in one piece by a copy of
the tokenizer in which control tokens have other names, after the template's own control tokens were replaced by these
names. A spelling in a text thus becomes plain characters, merged with its neighbours like any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, Final

from pipelinerl.errors import ModelError, TemplateNameError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: A message as templates take it: `role`, `content`, and optionally `tool_calls`, `tool_call_id`, `name` and
#: `reasoning_content`.
Turn = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """The input of a chat template: turns, the tools offered, and `also`, other names that the template may look up."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()
    also: Mapping[str, Any] = field(default_factory=dict)

    def rewritten(self, change: Callable[[Text], str]) -> Chat:
        """Return a copy in which `change` has replaced each text, in a fixed order; roles and `also` stay unchanged."""
        turns = [_rewritten_turn(row, turn, change) for row, turn in enumerate(self.turns)]
        tools = [_rewritten(tool, "tool", f"tools.{row}", change) for row, tool in enumerate(self.tools)]
        return Chat(turns=turns, tools=tools, also=self.also)

    def texts(self) -> list[Text]:
        """Return all texts, in the order in which `rewritten` visits them."""
        found: list[Text] = []

        def keep(text: Text) -> str:
            found.append(text)
            return text.value

        self.rewritten(keep)
        return found


@dataclass(frozen=True, slots=True)
class Text:
    """A text of a chat, the role that decides which control tokens it may spell, and its path in the chat."""

    value: str
    role: str
    place: str


#: Function that renders a template, as `ContentGuard` describes.
Render = Callable[[Chat, bool], str]
#: Function that returns the position in a rendered text from which the text is to be encoded.
Begin = Callable[[str], int]

#: Fields of a message whose permitted control tokens depend on its role. All other fields are data, whatever the role.
_SPOKEN: Final = frozenset({"content", "reasoning_content"})
#: Roles whose contents are data and may not contain inner control tokens.
_DATA_ROLES: Final = frozenset({"user", "tool"})
#: Bounds of Unicode's private characters, which no tokenizer changes. Those from `_NAMES` on name control tokens in the
#: copied tokenizer; those from `_MARKS` on mark positions in texts.
_NAMES, _MARKS, _LAST = 0xF0000, 0x100000, 0x10FFFE
#: Matches a symbol. Control tokens contain symbols, ordinary words rarely do.
_SYMBOL: Final = re.compile(r"[^\w\s]")
_HALF: Final = "a text contains a lone surrogate (U+D800 to U+DFFF), half of a character; leave it out"
#: Maximum number of chats, reduced by `_shape`, whose structural tokens are cached.
_SHAPES: Final = 256


class Spellings:
    """A set of strings, none empty, and a search for all their occurrences in a text, including overlapping ones."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts)
        self._lengths = sorted({len(text) for text in self._texts})
        firsts = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")

    def starts(self, content: str) -> list[int]:
        """Return the positions in `content` at which any of the strings begins."""
        return [
            at
            for at in (found.start() for found in self._first.finditer(content))
            if any(content[at : at + length] in self._texts for length in self._lengths)
        ]


class ContentGuard:
    """Encoder of conversations for one tokenizer and template.

    Args:
        backend: a tokenizer without truncation and padding.
        template: the source of the chat template, empty if there is none.
        render: renders a chat; its second argument adds the opening of the assistant's turn. Raises `ModelError` for a
            chat that the template rejects.
        ends: ids that end a sample.
        unknown: the id of characters that the tokenizer does not know.
    """

    def __init__(
        self, backend: Tokenizer, *, template: str, render: Render, ends: Iterable[int], unknown: int | None
    ) -> None:
        self._backend = backend
        self._render = render
        try:
            around = render(Chat(turns=[{"role": "user", "content": "a"}]), False)
        except ModelError:
            around = template  # it rejects a lone user message: all its control tokens count as structural
        added, ends = backend.get_added_tokens_decoder(), frozenset(ends)
        spellings = {index: token.content for index, token in added.items() if token.content}
        structural = {
            index for index, text in spellings.items() if added[index].special or index in ends or text in around
        }
        self._control = {
            index: text for index, text in sorted(spellings.items()) if index in structural or text in template
        }
        self._structural = frozenset(structural - {unknown})
        self._unknown = unknown
        self._closed_to_all = Spellings(spellings[index] for index in structural)
        self._closed_to_data = Spellings(self._control.values())
        self._expected = lru_cache(maxsize=_SHAPES)(
            lambda shape: self._structure_of_rendering(Chat(**json.loads(shape)), None)
        )

    def encode_chat(self, chat: Chat, *, begin: Begin | None = None, first_row: int = 0) -> list[int]:
        """Return token ids of the rendered conversation, with the opening of the assistant's turn.

        `begin` returns the position in the rendered text from which to encode; `first_row` is added to the numbers of
        turns in error messages.

        Raises:
            ModelError: the template rejects the chat; or a text in `also` spells a control token; or another text
                spells one, and the template changes this text in a way that cannot be tracked.
        """
        for name, value in chat.also.items():
            if isinstance(value, str) and self._closed_to_data.starts(value):
                raise TemplateNameError(
                    f"chat_template_kwargs.{name} spells a control token of this model; leave it out"
                )
        text = self._render(chat, True)
        start = begin(text) if begin else 0
        ids = self._ids(text[start:])
        texts = chat.texts()
        spelt = [self._closed_to(each.role).starts(each.value) for each in texts]
        if any(spelt):
            data = self._places(chat, texts, spelt, text)
            if data is None:
                place = next(each.place for each, found in zip(texts, spelt, strict=True) if found)
                raise ModelError(
                    f"{_moved(place, first_row)} spells a control token of this model, and the chat template changes "
                    "texts with such spellings in a way that cannot be tracked; leave the spelling out"
                )
            return self._apart(text[start:], _after(start, data))
        # No text spells a control token, but a normalizer or the template may still turn a part of a text into one.
        if begin:  # replace symbols in the data by letters, so that the data spells no structural token
            plain = chat.rewritten(lambda it: _SYMBOL.sub("a", it.value) if it.role in _DATA_ROLES else it.value)
            expected = self._structure_of_rendering(plain, begin)
        else:
            expected = self._expected(_shape(chat))
        if self._structure(ids) == expected:
            return ids
        symbols = [[at.start() for at in _SYMBOL.finditer(each.value)] for each in texts]
        data = self._places(chat, texts, symbols, text)
        # If `data` is None, marks in the texts would change the rest of the output. No text spells a control token, so
        # the tokenizer's own ids are safe.
        return ids if data is None else self._apart(text[start:], _after(start, data))

    def encode_content(self, content: str, *, role: str) -> list[int]:
        """Return token ids of `content` without a template, by the rules for this role. Raises `ModelError`."""
        spelt = self._closed_to(role).starts(content)
        return self._apart(content, frozenset(spelt)) if spelt else self._ids(content)

    def _ids(self, text: str) -> list[int]:
        """Return the ids that the tokenizer itself gives `text`; omit offsets, which would take a tenth longer."""
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise ModelError(_HALF) from None
        return ids

    def _closed_to(self, role: str) -> Spellings:
        return self._closed_to_data if role in _DATA_ROLES else self._closed_to_all

    def _structure(self, ids: Iterable[int]) -> list[int]:
        structural = self._structural
        return [index for index in ids if index in structural]

    def _structure_of_rendering(self, chat: Chat, begin: Begin | None) -> list[int] | None:
        """Return the structural tokens of a rendering from the position `begin` on; None if it fails."""
        try:
            text = self._render(chat, True)
        except ModelError:
            return None
        return self._structure(self._ids(text[begin(text) if begin else 0 :]))

    def _places(
        self, chat: Chat, texts: Sequence[Text], starts: Sequence[Sequence[int]], text: str
    ) -> frozenset[int] | None:
        """Return the positions in the rendered `text` of the characters at `starts` in the chat's texts.

        To find them, they are replaced by private-use characters before rendering. None if this changes the rest of the
        rendering. Raises ModelError if the texts use up all private-use characters.
        """
        known = set(text)
        unused = (mark for mark in map(chr, range(_MARKS, _LAST)) if mark not in known)
        chars = sorted({each.value[at] for each, places in zip(texts, starts, strict=True) for at in places})
        marks = dict(zip(chars, unused, strict=False))
        if len(marks) < len(chars):
            raise ModelError("the messages hold too many of Unicode's private characters; leave them out")
        places = iter(starts)
        rendered = self._render(chat.rewritten(lambda each: _marked(each.value, next(places), marks)), True)
        if rendered.translate({ord(mark): char for char, mark in marks.items()}) != text:
            return None
        used = frozenset(marks.values())
        return frozenset(at for at, char in enumerate(rendered) if char in used)

    def _apart(self, text: str, data: frozenset[int]) -> list[int]:
        """Return ids of `text`; control tokens that contain a character at a position in `data` become plain text."""
        try:
            encoding = self._backend.encode(text, add_special_tokens=False)
        except TypeError:
            raise ModelError(_HALF) from None
        written: list[int] = []
        parts: list[str] = []
        done, smuggled = 0, False
        for index, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            if index not in self._control:
                continue
            spelling = self._control[index]
            at = text.find(spelling, start, end)  # the offsets may include blanks around the token
            if at < 0 and index == self._unknown:
                continue
            at, length = (start, end - start) if at < 0 else (at, len(spelling))
            if not data.isdisjoint(range(at, at + length)):
                smuggled = True
                continue
            written.append(index)
            parts += (text[done:at], self._names[index])
            done = at + length
        if not smuggled:
            own: list[int] = encoding.ids
            return own
        if not set(self._names.values()).isdisjoint(text):
            raise ModelError(
                "a text that spells a control token of this model may not hold Unicode's private characters from "
                f"U+{_NAMES:X} on; leave one of the two out"
            )
        ids: list[int] = self._renamed.encode("".join([*parts, text[done:]]), add_special_tokens=False).ids
        if self._structure(ids) != self._structure(written):
            raise ModelError(
                "a text spells a control token of this model, and its tokenizer has no plain form for that; leave "
                "the spelling out"
            )
        return ids

    @cached_property
    def _names(self) -> dict[int, str]:
        return {index: chr(_NAMES + row) for row, index in enumerate(self._control)}

    @cached_property
    def _renamed(self) -> Tokenizer:
        """A copy of the tokenizer with renamed control tokens; made on first use, as it may take a second."""
        from tokenizers import Tokenizer

        names = {self._control[index]: name for index, name in self._names.items()}
        made: dict[str, Any] = json.loads(self._backend.to_str())
        for token in made["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        model = made["model"]
        if isinstance(model["vocab"], dict):
            model["vocab"] = {names.get(piece, piece): index for piece, index in model["vocab"].items()}
        else:
            model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
        if "merges" in model:
            pairs = (merge.split(" ", 1) if isinstance(merge, str) else merge for merge in model["merges"])
            model["merges"] = [pair for pair in pairs if names.keys().isdisjoint({*pair, "".join(pair)})]
        if model.get("unk_token"):
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        made["post_processor"] = None  # a post-processor would add tokens around the text
        return Tokenizer.from_str(json.dumps(made))


def _after(start: int, places: frozenset[int]) -> frozenset[int]:
    return frozenset(at - start for at in places if at >= start)


def _moved(place: str, rows: int) -> str:
    """Return `place`, such as `messages.0.content`, with `rows` added to its message number."""
    table, row, *rest = place.split(".")
    return ".".join([table, str(int(row) + rows), *rest]) if table == "messages" else place


def _rewritten_turn(row: int, turn: Turn, change: Callable[[Text], str]) -> Turn:
    role = turn["role"]
    return {
        name: value
        if name == "role"
        else _rewritten(value, role if name in _SPOKEN else "tool", f"messages.{row}.{name}", change)
        for name, value in turn.items()
    }


def _rewritten(value: Any, role: str, place: str, change: Callable[[Text], str]) -> Any:
    """Apply `change` to each text in `value` and to names of fields, which are data in a call's arguments."""
    if isinstance(value, str):
        return change(Text(value, role, place))
    if isinstance(value, Mapping):
        return {
            change(Text(name, role, place)): _rewritten(each, role, f"{place}.{name}", change)
            for name, each in value.items()
        }
    if isinstance(value, Sequence):
        return [_rewritten(each, role, f"{place}.{row}", change) for row, each in enumerate(value)]
    return value


def _shape(chat: Chat) -> str:
    """Return a chat as JSON, in which texts are reduced to the features that a template may depend on."""
    turns = [{name: _shape_of(name, value) for name, value in turn.items()} for turn in chat.turns]
    tools = [_rewritten(tool, "tool", "", lambda each: _SYMBOL.sub("a", each.value)) for tool in chat.tools]
    return json.dumps({"turns": turns, "tools": tools, "also": dict(sorted(chat.also.items()))})


def _shape_of(name: str, value: Any) -> Any:
    if name == "role":
        return value
    if name == "tool_calls":
        return [
            {"id": "a" * len(call["id"]), "type": call["type"], "function": {"name": "a", "arguments": arguments}}
            for call in value
            for given in [call["function"]["arguments"]]
            for arguments in ["a" if isinstance(given, str) else {"a": "a"} if given else {}]
        ]
    if name in _SPOKEN:
        return "a" if value.strip() else ""
    return "a" * len(value)


def _marked(content: str, places: Iterable[int], marks: Mapping[str, str]) -> str:
    letters = list(content)
    for at in places:
        letters[at] = marks[letters[at]]
    return "".join(letters)


#: Text that replaces an answer, to find the answer's position; no template or tokenizer changes letters and digits.
_MARK: Final = "Qz7answerQz7"
_ASKS: Final[Turn] = {"role": "user", "content": "a"}


class _NoTail(Exception):
    """Raised if the text that a template writes after an answer cannot be separated."""


class ConversationTail:
    """Encoder of the tokens that a chat template writes after an answer, up to the opening of the next one.

    A continued conversation keeps its tokens exactly as sampled; only new messages are rendered.

        sampled tokens … answer | <end of turn> new messages, opening of the assistant's turn
                                └───────────────────── the tail ─────────────────────────────┘

    The tail is the text after the last mark, a placeholder for the answer, in one rendering of the short conversation
    `[user, assistant(MARK), *new messages]`. The difference of two renderings would be wrong, because templates may
    render earlier messages differently once later ones follow. There is no tail if a template omits the mark or rejects
    the short conversation.

    `ends` has the spelling of each token that ends a sample, by id. `in_style` brings the calls of messages into the
    form that the template takes.
    """

    def __init__(
        self,
        guard: ContentGuard,
        render: Render,
        ends: Mapping[int, str],
        in_style: Callable[[Sequence[Turn]], list[Turn]] = list,
    ) -> None:
        self._guard = guard
        self._render = render
        self._ends = dict(ends)
        self._in_style = in_style
        self._closing = cache(self._closing_after)

    def encode(self, chat: Chat, first_new: int, *, last_id: int) -> list[int] | None:
        """Return the token ids that follow the answer `chat.turns[first_new - 1]`, whose last token is `last_id`.

        None if there is no tail. Raises ModelError like `ContentGuard.encode_chat`.
        """
        new = chat.turns[first_new:]
        said = "\n".join(each.value for each in Chat(turns=new).texts())
        mark = next(mark for mark in (_MARK + "x" * more for more in count()) if mark not in said)
        answer = _with_mark(chat.turns[first_new - 1], mark)
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
            return None  # the caller renders the whole conversation, which the template may accept
        try:
            ids = self._guard.encode_chat(short, begin=begin, first_row=first_new - 2)
        except _NoTail:
            return None
        return ids[1:] if last_id in self._ends and ids and ids[0] in self._ends else ids

    def reproduces_deployment(self, *, calls: int = 0) -> bool:
        """Return whether an answer with `calls` calls (0: a text) and its tail read as in the whole conversation."""
        plain = _answer(calls)
        results: list[Turn] = [
            {"role": "tool", "content": "c", "name": "f", "tool_call_id": call["id"]}
            for call in plain.get("tool_calls", ())
        ]
        answer, *replies = self._in_style([plain, *(results or [{"role": "user", "content": "c"}])])
        try:
            opened = self._render(Chat(turns=[_ASKS, answer]), False)
            whole = self._render(Chat(turns=[_ASKS, answer, *replies]), True)
            short = self._render(Chat(turns=[_ASKS, _with_mark(answer, _MARK), *replies]), True)
        except ModelError:
            return False
        closing, before_end = self._closing(calls)
        at = short.rfind(_MARK)
        if at < 0 or not closing or closing not in opened:
            return at >= 0 and whole.endswith(short[at + len(_MARK) :])
        end = opened.rfind(closing) + before_end
        return whole == opened[:end] + short[at + len(_MARK) + before_end :]

    def _closing_after(self, calls: int) -> tuple[str, int]:
        """Return the text that the template writes after an answer, up to and including the token that ends the turn.

        The second value is the number of characters before this token.
        The answer has `calls` tool calls, or a text if `calls` is 0. Returns ("", 0) if there is no such token.
        """
        try:
            (answer,) = self._in_style([_answer(calls)])
            text = self._render(Chat(turns=[_ASKS, _with_mark(answer, _MARK)]), False)
        except ModelError:
            return "", 0
        closing = text[text.rfind(_MARK) + len(_MARK) :] if _MARK in text else ""
        found = [(closing.find(end), end) for end in self._ends.values() if end in closing]
        if not found:
            return "", 0  # the template writes no token at the end of a turn
        at, end = min(found)
        return closing[: at + len(end)], at


def _with_mark(answer: Turn, mark: str) -> Turn:
    """Return the answer with the mark as its content and in its calls' arguments, since templates may omit either."""
    marked = {**answer, "content": mark}
    marked.pop("reasoning_content", None)
    if calls := answer.get("tool_calls"):
        functions = [call["function"] for call in calls]
        arguments = [mark if isinstance(function["arguments"], str) else {"a": mark} for function in functions]
        marked["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": own}}
            for call, own in zip(calls, arguments, strict=True)
        ]
    return marked


def _answer(calls: int) -> Turn:
    """Return an answer with `calls` tool calls, or with a text if `calls` is 0."""
    if not calls:
        return {"role": "assistant", "content": "b"}
    function = {"name": "f", "arguments": {"a": "b"}}
    listed = [{"id": f"call{number}", "type": "function", "function": function} for number in range(calls)]
    return {"role": "assistant", "content": "", "tool_calls": listed}
