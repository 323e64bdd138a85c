"""`ContentGuard`: encodes a chat so that templates may write control tokens and contents may not.

A control token is an added token that structures a conversation. There are two kinds:

    structural   special by its flag, or ends a sample, or the template writes it around a plain user message.
                 No content becomes one, whatever its role.
    inner        any other added token that the template mentions (Qwen's `<think>`, `<tool_call>`, `<tool_response>`).
                 Contents of `user` and `tool` do not become one, for they carry data. Those of `system` and
                 `assistant` do: the operator writes the first, the model itself samples such tokens in the second,
                 and few-shot answers must show it what it is to sample.

All other added tokens are vocabulary, for everybody. Control text that is no added token (Llama 2's `[INST]`) cannot be
told from data by its tokens, here or anywhere.

A chat that spells no control token gets the tokenizer's own ids of the rendered text, to the id. Otherwise it is known
which spellings are data: the template is rendered again with the first character of each replaced by a private one,
which must come out as the same text but for these characters. The text is then encoded in one piece by a twin of the
tokenizer in which control tokens have other names, and the template's have been replaced by them. So a spelling in a
content comes out as its plain characters, merged with its neighbours as the tokenizer merges any text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Final, final

from pipelinerl.errors import ModelError, TemplateNameError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: A message as templates take it: `role`, `content`, and where it has them `tool_calls`, `tool_call_id`, `name` and
#: `reasoning_content`.
Turn = dict[str, Any]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """What a chat template renders: turns, the tools offered, and names that it may look up besides."""

    turns: Sequence[Turn]
    tools: Sequence[Mapping[str, Any]] = ()
    also: Mapping[str, Any] = field(default_factory=dict)

    def rewritten(self, change: Callable[[Text], str]) -> Chat:
        """Return the chat with each of its texts changed, visited in a fixed order. Roles and `also` stay."""
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


@final
@dataclass(frozen=True, slots=True)
class Text:
    """A text of a chat, with the role whose rights it has, and its place (`messages.0.content`)."""

    value: str
    role: str
    place: str


#: Renders a template, as `ContentGuard` says.
Render = Callable[[Chat, bool], str]
#: Where in a rendered text its encoding begins.
Begin = Callable[[str], int]

#: Texts that speak for the message's role. All else of a message is data, whoever wrote it.
_SPOKEN: Final = frozenset({"content", "reasoning_content"})
#: Of these roles the contents are data, which may not become inner control tokens either.
_DATA_ROLES: Final = frozenset({"user", "tool"})
#: Private characters, which no tokenizer changes: names of control tokens in the twin, and marks of data.
_NAMES, _MARKS, _LAST = 0xF0000, 0x100000, 0x10FFFE
#: What control tokens have and words rarely.
_SYMBOL: Final = re.compile(r"[^\w\s]")
_HALF: Final = "a text holds half of a character, a lone surrogate (U+D800 to U+DFFF); leave it out"
#: Shapes of conversations whose structure is remembered.
_SHAPES: Final = 256


@final
@dataclass(frozen=True, slots=True)
class Spellings:
    """A set of texts, to be searched for wherever they begin, overlapping ones included."""

    texts: frozenset[str]
    lengths: tuple[int, ...]
    first: re.Pattern[str]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Spellings:
        """Those of `texts`, which are not empty."""
        known = frozenset(texts)
        firsts = "".join(sorted({re.escape(text[0]) for text in known}))
        return cls(known, tuple(sorted({len(text) for text in known})), re.compile(f"[{firsts}]" if firsts else "(?!)"))

    def starts(self, content: str) -> list[int]:
        """Where in `content` any of them begins."""
        return [
            at
            for at in (found.start() for found in self.first.finditer(content))
            if any(content[at : at + length] in self.texts for length in self.lengths)
        ]


@final
class ContentGuard:
    """Encodes conversations for one tokenizer and template.

    Args:
        backend: without truncation and padding.
        template: the source of the chat template, empty if there is none.
        render: the template's text of a chat; the second argument says whether it opens the assistant's turn. Raises
            `ModelError` for a chat that the template refuses.
        ends: ids that end a sample.
        unknown: the id that stands for characters which the tokenizer does not know.
    """

    def __init__(
        self,
        backend: Tokenizer,
        *,
        template: str,
        render: Render,
        ends: Iterable[int],
        unknown: int | None,
    ) -> None:
        self._backend = backend
        self._render = render
        try:
            around = render(Chat(turns=[{"role": "user", "content": "a"}]), False)
        except ModelError:
            around = template  # which wants more than a user message: then all that it mentions is structure
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
        self._closed_to_all = Spellings.of(spellings[index] for index in structural)
        self._closed_to_data = Spellings.of(self._control.values())
        self._expected = lru_cache(maxsize=_SHAPES)(self._structure_of_shape)

    def encode_chat(self, chat: Chat, *, begin: Begin | None = None, first_row: int = 0) -> list[int]:
        """Token ids of the rendered conversation, the opening of the assistant's turn included.

        The template writes the texts of `chat.also` as it likes, so that none of them may spell a control token.

        Args:
            begin: where in the rendered text to begin, by default at its start; no control token may lie across that.
            first_row: the number of the first turn, as errors count messages.

        Raises:
            ModelError: the template refuses the chat; a text of `also` spells a control token; or another text does
                where it cannot be told what the template does with it.
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
                    "texts with such spellings in a way that cannot be followed; leave the spelling out"
                )
            return self._apart(text[start:], _after(start, data))
        # A normalizer, or the template, may still make a control token of what texts hold.
        expected = self._structure_of_tail(chat, begin) if begin else self._expected(_shape(chat))
        if self._structure(ids) == expected:
            return ids
        symbols = [[at.start() for at in _SYMBOL.finditer(each.value)] for each in texts]
        data = self._places(chat, texts, symbols, text)
        # None: what this template writes depends on texts, none of which spells a control token.
        return ids if data is None else self._apart(text[start:], _after(start, data))

    def encode_content(self, content: str, *, role: str) -> list[int]:
        """Token ids of `content` alone, as it would be in a message of this role. Raises `ModelError`."""
        spelt = self._closed_to(role).starts(content)
        return self._apart(content, frozenset(spelt)) if spelt else self._ids(content)

    def _ids(self, text: str) -> list[int]:
        """The tokenizer's own, without the offsets, which cost a tenth more."""
        try:
            ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids
        except TypeError:
            raise ModelError(_HALF) from None
        return ids

    def _closed_to(self, role: str) -> Spellings:
        return self._closed_to_data if role in _DATA_ROLES else self._closed_to_all

    def _structure(self, ids: Iterable[int]) -> list[int]:
        """The structural tokens among `ids`."""
        structural = self._structural
        return [index for index in ids if index in structural]

    def _structure_of_shape(self, shape: str) -> list[int] | None:
        """What the template writes around the texts of a chat of this shape; None if it refuses them."""
        try:
            text = self._render(Chat(**json.loads(shape)), True)
        except ModelError:
            return None
        return self._structure(self._ids(text))

    def _structure_of_tail(self, chat: Chat, begin: Begin) -> list[int] | None:
        """What the template writes from `begin` on, around data without symbols; None if it refuses that."""
        plain = chat.rewritten(lambda each: _SYMBOL.sub("a", each.value) if each.role in _DATA_ROLES else each.value)
        try:
            text = self._render(plain, True)
        except ModelError:
            return None
        return self._structure(self._ids(text[begin(text) :]))

    def _places(
        self, chat: Chat, texts: Sequence[Text], starts: Sequence[Sequence[int]], text: str
    ) -> frozenset[int] | None:
        """Where in the rendered `text` those characters are that stand in the chat's texts at `starts`.

        None: with these characters marked, the template renders something else. Raises `ModelError` when the messages
        leave no character to mark with.
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
        """Ids of `text`, in which a control token that holds one of the characters at `data` is plain text."""
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
            at = text.find(spelling, start, end)  # the tokenizer may count blanks around it as part of it
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
        ids: list[int] = self._twin.encode("".join([*parts, text[done:]]), add_special_tokens=False).ids
        if self._structure(ids) != self._structure(written):
            raise ModelError(
                "a text spells a control token of this model, and its tokenizer has no plain form for that; leave "
                "the spelling out"
            )
        return ids

    @cached_property
    def _names(self) -> dict[int, str]:
        """What the twin calls the control tokens."""
        return {index: chr(_NAMES + row) for row, index in enumerate(self._control)}

    @cached_property
    def _twin(self) -> Tokenizer:
        """The tokenizer with these names. A large one takes about a second to make: once, when it is first needed."""
        return _renamed(self._backend, {self._control[index]: name for index, name in self._names.items()})


def _after(start: int, places: frozenset[int]) -> frozenset[int]:
    """The places from `start` on, counted from there."""
    return frozenset(at - start for at in places if at >= start)


def _moved(place: str, rows: int) -> str:
    """The place of a text, if messages are counted from `rows` on."""
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
    """`value` with each text in it changed, the names of fields included: in arguments they are data as well."""
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
    """Return a chat as JSON whose texts say only as much as the structure around them may depend on.

    Contents are blank or not, calls have arguments or not, and an identifier keeps its length. Of tools all words stay.
    """
    turns = [{name: _shape_of(name, value) for name, value in turn.items()} for turn in chat.turns]
    tools = [_rewritten(tool, "tool", "", lambda each: _SYMBOL.sub("a", each.value)) for tool in chat.tools]
    return json.dumps({"turns": turns, "tools": tools, "also": dict(sorted(chat.also.items()))})


def _shape_of(name: str, value: Any) -> Any:
    if name == "role":
        return value
    if name == "tool_calls":
        return [
            {"id": "a" * len(call["id"]), "type": call["type"], "function": _shape_of_call(call["function"])}
            for call in value
        ]
    if name in _SPOKEN:
        return "a" if value.strip() else ""
    return "a" * len(value)


def _shape_of_call(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return {"name": "a", "arguments": "a"}
    return {"name": "a", "arguments": {"a": "a"} if arguments else {}}


def _marked(content: str, places: Iterable[int], marks: Mapping[str, str]) -> str:
    """`content` with its characters at these places replaced by their marks."""
    letters = list(content)
    for at in places:
        letters[at] = marks[letters[at]]
    return "".join(letters)


def _renamed(backend: Tokenizer, names: Mapping[str, str]) -> Tokenizer:
    """The same tokenizer but for the spelling of some tokens, among the added ones and in the model's vocabulary."""
    from tokenizers import Tokenizer

    made: dict[str, Any] = json.loads(backend.to_str())
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
    made["post_processor"] = None  # it adds tokens around a text, which nobody asks for here
    return Tokenizer.from_str(json.dumps(made))
