"""`Instruction`: a requirement on an answer that a program can verify (Zhou et al. 2023, IFEval).

`Instruction.follows` is a pure function of the text, and takes time linear in the text's length for any text.

Words are runs of letters, digits and underscores, as in IFEval. IFEval finds sentences by NLTK's Punkt model. Here a
sentence ends at `.`, `!`, `?` or `…` before a space, unless the dot belongs to a known abbreviation or a single capital
letter.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, ClassVar, Final, Protocol

from msgspec import Meta, Struct
from msgspec.structs import StructConfig

Count = Annotated[int, Meta(ge=1, le=100_000)]
Text = Annotated[str, Meta(min_length=1, max_length=20_000)]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=1000)]


class Kind(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="id"):
    """Base of all kinds of instructions. The fields are the parameters; the tag is the id by which data name a kind."""


class Instruction(Protocol):
    """A requirement on an answer: a `Kind` with its parameters."""

    __struct_config__: ClassVar[StructConfig]
    __struct_fields__: ClassVar[tuple[str, ...]]
    sentence: ClassVar[str]
    """Template of the sentence that states the instruction in a prompt; its fields are the parameters."""

    def follows(self, answer: str) -> bool:
        """Return whether a non-blank answer follows the instruction."""
        ...


def id_of(instruction: Instruction | type[Instruction]) -> str:
    """Return the id of an instruction or of its kind, such as `punctuation:no_comma`."""
    return str(instruction.__struct_config__.tag)


def stated(instruction: Instruction) -> str:
    """Return the sentence that states the instruction in a prompt."""
    shown = {name: getattr(instruction, name) for name in instruction.__struct_fields__}
    for name, value in shown.items():
        if isinstance(value, list):
            shown[name] = ", ".join(f'"{each}"' for each in value)
    return instruction.sentence.format(**shown)


class Relation(StrEnum):
    """Comparison of a count with the wanted count; `AT_MOST`, `AROUND` and `EXACTLY` occur only in RLVR-IFeval."""

    AT_LEAST = "at least"
    LESS_THAN = "less than"
    AT_MOST = "at most"
    AROUND = "around"
    """Differs from the wanted count by at most 10 percent, or by 1."""
    EXACTLY = "exactly"

    def holds(self, count: int, wanted: int) -> bool:
        match self:
            case Relation.AT_LEAST:
                return count >= wanted
            case Relation.LESS_THAN:
                return count < wanted
            case Relation.AT_MOST:
                return count <= wanted
            case Relation.AROUND:
                return abs(count - wanted) <= max(1, round(wanted / 10))
            case Relation.EXACTLY:
                return count == wanted


_WORD: Final = re.compile(r"\w+")
_WORD_WITH_HYPHENS: Final = re.compile(r"\w+(?:[-'’]\w+)*+")
#: Matches the end of a sentence, with closing quotes and brackets; no space is needed after full-width punctuation.
_END: Final = re.compile(r"[.!?…]++[\"'”’)\]*]*+(?=\s|$)|[。！？]++|\n{2,}+")
_BEFORE_A_DOT: Final = re.compile(r"(\w+)\.$")
#: Words before the last dot of known abbreviations, such as "dr" of "Dr.", "g" of "e.g." and "e" of "i.e.".
_ABBREVIATIONS: Final = frozenset(
    {
        "al", "approx", "cf", "co", "dept", "dr", "e", "est", "etc", "fig", "g", "inc", "jr", "ltd", "mr", "mrs", "ms",
        "no", "prof", "rev", "sr", "st", "vol", "vs",
    }
)  # fmt: skip
#: Number of characters before a sentence's end searched for an abbreviation: the longest, its dot and a bracket.
_LOOK_BACK: Final = 12


def words(text: str) -> list[str]:
    """Return the words of the text as IFEval counts them: "don't" is two words."""
    return _WORD.findall(text)


def hyphenated_words(text: str) -> list[str]:
    """Return the words of the text; a word with an inner hyphen or apostrophe counts as one."""
    return _WORD_WITH_HYPHENS.findall(text)


def num_sentences(text: str) -> int:
    """Return the number of sentences that have at least one word."""
    count, begin = 0, 0
    for end in _END.finditer(text):
        if end[0].startswith(".") and len(end[0]) == 1 and _is_abbreviation(text, end.end()):
            continue
        count += _WORD.search(text, begin, end.end()) is not None
        begin = end.end()
    return count + (_WORD.search(text, begin) is not None)


def _is_abbreviation(text: str, end: int) -> bool:
    if end >= len(text):
        return False
    word = _BEFORE_A_DOT.search(text, max(0, end - _LOOK_BACK), end)
    if word is None:
        return False
    return word[1].lower() in _ABBREVIATIONS or (len(word[1]) == 1 and word[1].isupper() and word[1] != "I")


def script_shares(text: str) -> dict[str, float]:
    """Return each script's share of the letters, by Unicode's names: LATIN, CYRILLIC, HANGUL, CJK…"""
    counts = Counter(filter(None, map(_script, text)))
    return {script: count / counts.total() for script, count in counts.items()}


@lru_cache(maxsize=2**16)
def _script(letter: str) -> str:
    """Return the script of a letter or combining mark, the first word of its Unicode name; "" for other characters."""
    return unicodedata.name(letter, "").partition(" ")[0] if unicodedata.category(letter)[0] in "LM" else ""
