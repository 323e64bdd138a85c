"""Instructions on the form of an answer: lists, sections, titles, JSON, placeholders, postscripts.

They are stricter than IFEval's code where that code would reward empty answers: JSON must be an object or an array.
"""

from __future__ import annotations

import re
from typing import Final

import orjson
from msgspec import Struct, field

from pipelinerl.instructions.instruction import Count, Text, Texts

_PLACEHOLDER: Final = re.compile(r"\[[^\[\]\n]+\]")
_HIGHLIGHT: Final = re.compile(r"\*\*[^\n*]*\*\*|\*[^\n*]*\*")
_FENCE: Final = re.compile(r"```(?:json)?", re.IGNORECASE)
_POSTSCRIPTS: Final = {
    "P.S.": re.compile(r"p\.\s?s\.", re.IGNORECASE),
    "P.P.S": re.compile(r"p\.\s?p\.\s?s", re.IGNORECASE),
}
#: The options of IFEval's `detectable_format:constrained_response`.
CONSTRAINED_RESPONSES: Final = ("My answer is yes.", "My answer is no.", "My answer is maybe.")


class NumberOfBullets(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_format:number_bullet_lists`: require an exact number of lines that begin with `*` or `-`."""

    num_bullets: Count

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return (
            f"Your answer must contain exactly {self.num_bullets} bullet points. Use the markdown bullet points such "
            "as:\n* This is a point."
        )

    def follows(self, answer: str) -> bool:
        """Return whether the answer has exactly `num_bullets` bullet points."""
        lines = (line.strip() for line in answer.split("\n"))
        points = sum(line.startswith("-") or (line[:1] == "*" and line[1:2] not in ("", "*")) for line in lines)
        return points == self.num_bullets


class MultipleSections(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_format:multiple_sections`: require a minimum number of sections with numbered headings."""

    section_spliter: Text
    num_sections: Count

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return (
            f"Your answer must have {self.num_sections} sections. Mark the beginning of each section with "
            f"{self.section_spliter} X, such as:\n{self.section_spliter} 1"
        )

    def follows(self, answer: str) -> bool:
        """Return whether the given word, followed by a number, occurs at least `num_sections` times."""
        return len(re.findall(re.escape(self.section_spliter.strip()) + r"\s?\d", answer)) >= self.num_sections


class HighlightedSections(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_format:number_highlighted_sections`: require a minimum number of texts between asterisks."""

    num_highlights: Count

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return (
            f"Highlight at least {self.num_highlights} sections in your answer with markdown, i.e. *highlighted "
            "section*."
        )

    def follows(self, answer: str) -> bool:
        """Return whether the answer highlights at least `num_highlights` texts that are not empty."""
        return sum(bool(found.strip("*").strip()) for found in _HIGHLIGHT.findall(answer)) >= self.num_highlights


class Title(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_format:title`: require a title in double angular brackets, on one line."""

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return "Your answer must contain a title, wrapped in double angular brackets, such as <<poem of joy>>."

    def follows(self, answer: str) -> bool:
        """Return whether the answer has a title `<<…>>` that is not empty and stands on one line."""
        for line in answer.split("\n"):
            begin, end = line.find("<<"), line.rfind(">>")
            if 0 <= begin < end and line[begin:end].strip("<> \t\r"):
                return True
        return False


class JsonFormat(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_format:json_format`: the whole answer must be a JSON object or array, optionally in a code fence."""

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return "Your entire output should be wrapped in JSON format. You can use markdown ticks such as ```."

    def follows(self, answer: str) -> bool:
        """Return whether the answer is a JSON object or array."""
        text = answer.strip()
        if opening := _FENCE.match(text):
            text = text[opening.end() :].removesuffix("```")
        try:
            return isinstance(orjson.loads(text.encode("utf-8", "replace")), dict | list)
        except orjson.JSONDecodeError:
            return False


class ConstrainedResponse(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_format:constrained_response`: require one of several given answers, by default IFEval's."""

    options: Texts = field(default_factory=lambda: list(CONSTRAINED_RESPONSES))

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return "Answer with one of the following options: " + ", ".join(f'"{each}"' for each in self.options)

    def follows(self, answer: str) -> bool:
        """Return whether the answer contains one of the options."""
        return any(option in answer for option in self.options)


class Placeholders(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_content:number_placeholders`: require a minimum number of placeholders in square brackets."""

    num_placeholders: Count

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return (
            f"The answer must contain at least {self.num_placeholders} placeholders represented by square brackets, "
            "such as [address]."
        )

    def follows(self, answer: str) -> bool:
        """Return whether the answer has at least `num_placeholders` placeholders that are not empty."""
        return len(_PLACEHOLDER.findall(answer)) >= self.num_placeholders


class Postscript(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`detectable_content:postscript`: require a postscript with a given marker, such as `P.S.`."""

    postscript_marker: Text

    @property
    def sentence(self) -> str:
        """The sentence that states the instruction in a prompt."""
        return f"At the end of your answer, add a postscript starting with {self.postscript_marker}"

    def follows(self, answer: str) -> bool:
        """Return whether the answer contains the marker of the postscript."""
        marker = self.postscript_marker.strip()
        pattern = _POSTSCRIPTS.get(marker) or re.compile(re.escape(marker), re.IGNORECASE)
        return pattern.search(answer) is not None
