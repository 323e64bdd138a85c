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
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, final

from pipelinerl.errors import ModelError, TemplateNameError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

#: A message as templates take it: `role` and `content`.
Turn = dict[str, str]
#: Renders a template, as `ContentGuard` says.
Render = Callable[[Sequence[Turn], bool, Mapping[str, Any]], str]

_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})

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
        render: the template's text of these turns; the second argument says whether it opens the assistant's turn,
            the third what else the template may look up. Raises `ModelError` for turns that the template refuses.
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
            around = render([{"role": "user", "content": "a"}], False, _NOTHING)
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

    def encode_chat(self, turns: Sequence[Turn], also: Mapping[str, Any] = _NOTHING) -> list[int]:
        """Token ids of the rendered conversation, the opening of the assistant's turn included.

        Args:
            also: what the template may look up beside the turns; it writes the texts in it as it likes, so that none
                may spell a control token.

        Raises:
            ModelError: the template refuses the turns; a text of `also` spells a control token; or a content does where
                it cannot be told what the template does with it.
        """
        for name, value in also.items():
            if isinstance(value, str) and self._closed_to_data.starts(value):
                raise TemplateNameError(
                    f"chat_template_kwargs.{name} spells a control token of this model; leave it out"
                )
        text = self._render(turns, True, also)
        ids = self._ids(text)
        spelt = [self._closed_to(turn["role"]).starts(turn["content"]) for turn in turns]
        if any(spelt):
            data = self._places(turns, spelt, text, also)
            if data is None:
                row = next(row for row, found in enumerate(spelt) if found)
                raise ModelError(
                    f"messages.{row}.content spells a control token of this model, and the chat template changes "
                    "contents with such spellings in a way that cannot be followed; leave the spelling out"
                )
            return self._apart(text, data)
        # A normalizer, or the template, may still make a control token of what contents hold.
        shape = tuple((turn["role"], not turn["content"].strip()) for turn in turns)
        if self._structure(ids) == self._expected(shape, tuple(sorted(also.items()))):
            return ids
        data = self._places(
            turns, [[at.start() for at in _SYMBOL.finditer(turn["content"])] for turn in turns], text, also
        )
        # None: what this template writes depends on contents, none of which spells a control token.
        return ids if data is None else self._apart(text, data)

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

    def _structure_of_shape(
        self, shape: tuple[tuple[str, bool], ...], also: tuple[tuple[str, Any], ...]
    ) -> list[int] | None:
        """What the template writes around contents that are blank or not; None if it refuses them."""
        try:
            text = self._render(
                [{"role": role, "content": "" if blank else "a"} for role, blank in shape], True, dict(also)
            )
        except ModelError:
            return None
        return self._structure(self._ids(text))

    def _places(
        self, turns: Sequence[Turn], starts: Sequence[Sequence[int]], text: str, also: Mapping[str, Any]
    ) -> frozenset[int] | None:
        """Where in the rendered `text` those characters are that stand in the turns' contents at `starts`.

        None: with these characters marked, the template renders something else. Raises `ModelError` when the messages
        leave no character to mark with.
        """
        known = set(text)
        unused = (mark for mark in map(chr, range(_MARKS, _LAST)) if mark not in known)
        chars = sorted({turn["content"][at] for turn, places in zip(turns, starts, strict=True) for at in places})
        marks = dict(zip(chars, unused, strict=False))
        if len(marks) < len(chars):
            raise ModelError("the messages hold too many of Unicode's private characters; leave them out")
        marked = [
            {**turn, "content": _marked(turn["content"], places, marks)}
            for turn, places in zip(turns, starts, strict=True)
        ]
        rendered = self._render(marked, True, also)
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
