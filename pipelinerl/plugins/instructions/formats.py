"""Instructions on the form of an answer: lists, sections, titles, JSON, placeholders, postscripts.

They are stricter than IFEval's code where that code would reward empty answers: JSON must be an object or an array.
"""

from __future__ import annotations

import re
from typing import ClassVar, Final

from msgspec import field
from pydantic_core import from_json

from pipelinerl.plugins.instructions.instruction import Count, Instruction, Text, Texts

_PLACEHOLDER: Final = re.compile(r"\[[^\[\]\n]+\]")
_HIGHLIGHT: Final = re.compile(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*")
_FENCE: Final = re.compile(r"```(?:json)?", re.IGNORECASE)
_POSTSCRIPTS: Final = {
    "P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE),
    "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE),
}
#: The options of IFEval's `detectable_format:constrained_response`.
CONSTRAINED_RESPONSES: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class NumberOfBullets(Instruction, frozen=True, tag="detectable_format:number_bullet_lists"):
    """Require an exact number of lines that begin with `*` or `-`."""

    sentence: ClassVar = (
        "Your answer must contain exactly {num_bullets} bullet points. Use the markdown bullet points such "
        "as:\n* This is a point."
    )
    num_bullets: Count

    def follows(self, answer: str) -> bool:
        lines = (line.strip() for line in answer.split("\n"))
        points = sum(line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines)
        return points == self.num_bullets


class MultipleSections(Instruction, frozen=True, tag="detectable_format:multiple_sections"):
    """Require a minimum number of headings: a word and a number."""

    sentence: ClassVar = (
        "Your answer must have {num_sections} sections. Mark the beginning of each section with "
        "{section_spliter} X, such as:\n{section_spliter} 1"
    )
    section_spliter: Text
    num_sections: Count

    def follows(self, answer: str) -> bool:
        return len(re.findall(re.escape(self.section_spliter.strip()) + r"\s?\d", answer)) >= self.num_sections


class HighlightedSections(Instruction, frozen=True, tag="detectable_format:number_highlighted_sections"):
    """Require a minimum number of texts between asterisks."""

    sentence: ClassVar = (
        "Highlight at least {num_highlights} sections in your answer with markdown, i.e. *highlighted section*."
    )
    num_highlights: Count

    def follows(self, answer: str) -> bool:
        return sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(answer)) >= self.num_highlights


class Title(Instruction, frozen=True, tag="detectable_format:title"):
    """Require a non-empty title in double angular brackets, on one line."""

    sentence: ClassVar = (
        "Your answer must contain a title, wrapped in double angular brackets, such as <<poem of joy>>."
    )

    def follows(self, answer: str) -> bool:
        for line in answer.split("\n"):
            begin, end = line.find("<<"), line.rfind(">>")
            if 0 <= begin < end and line[begin:end].strip("<> \t\r"):
                return True
        return False


class JsonFormat(Instruction, frozen=True, tag="detectable_format:json_format"):
    """The whole answer must be a JSON object or array, optionally in a code fence."""

    sentence: ClassVar = "Your entire output should be wrapped in JSON format. You can use markdown ticks such as ```."

    def follows(self, answer: str) -> bool:
        text = answer.strip()
        if opening := _FENCE.match(text):
            text = text[opening.end() :].removesuffix("```")
        try:
            return isinstance(from_json(text.encode("utf-8", "replace"), allow_inf_nan=False), dict | list)
        except ValueError:
            return False


class ConstrainedResponse(Instruction, frozen=True, tag="detectable_format:constrained_response"):
    """Require one of several answers, by default IFEval's."""

    sentence: ClassVar = "Answer with one of the following options: {options}"
    options: Texts = field(default_factory=lambda: list(CONSTRAINED_RESPONSES))

    def follows(self, answer: str) -> bool:
        return any(option in answer for option in self.options)


class Placeholders(Instruction, frozen=True, tag="detectable_content:number_placeholders"):
    """Require a minimum number of non-empty texts in square brackets."""

    sentence: ClassVar = (
        "The answer must contain at least {num_placeholders} placeholders represented by square brackets, "
        "such as [address]."
    )
    num_placeholders: Count

    def follows(self, answer: str) -> bool:
        return len(_PLACEHOLDER.findall(answer)) >= self.num_placeholders


class Postscript(Instruction, frozen=True, tag="detectable_content:postscript"):
    """Require a postscript with a given marker, such as `P.S.`."""

    sentence: ClassVar = "At the end of your answer, add a postscript starting with {postscript_marker}"
    postscript_marker: Text

    def follows(self, answer: str) -> bool:
        marker = self.postscript_marker.strip()
        pattern = _POSTSCRIPTS.get(marker) or re.compile(re.escape(marker), re.IGNORECASE)
        return pattern.search(answer) is not None
