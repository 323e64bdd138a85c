"""`Instruction`: something that an answer can be asked to do and that a program can check (Zhou et al. 2023, IFEval).

An instruction is a frozen struct: its fields are its parameters, checked when it is made. It promises that `follows` is
a pure function of the text, the same on every machine, in time linear in the text's length, whatever stands in it.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

from msgspec import Meta

Count = Annotated[int, Meta(ge=1, le=100_000)]
Text = Annotated[str, Meta(min_length=1, max_length=20_000)]
Texts = Annotated[list[Text], Meta(min_length=1, max_length=1000)]


class Instruction(Protocol):
    """One kind of instruction with its parameters."""

    @property
    def sentence(self) -> str:
        """How it is put to a model."""
        ...

    def follows(self, answer: str) -> bool:
        """Does this answer, which is not blank, do what is asked?"""
        ...


class Relation(StrEnum):
    """How a count is compared: the first two are in IFEval's data, the others in RLVR-IFeval's."""

    AT_LEAST = "at least"
    LESS_THAN = "less than"
    AT_MOST = "at most"
    AROUND = "around"
    """Within a tenth, or one."""
    EXACTLY = "exactly"

    def holds(self, count: int, wanted: int) -> bool:
        """Is the count as wanted?"""
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
