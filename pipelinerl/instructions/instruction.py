"""`Instruction`: a requirement on an answer that a program can verify (Zhou et al. 2023, IFEval).

An instruction is a frozen struct. Its fields are its parameters, which are validated on construction. `follows` is a
pure function of the text, the same on every machine, and takes time linear in the text's length for any text.
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
        """The prompt for a model."""
        ...

    def follows(self, answer: str) -> bool:
        """Return whether this answer, which is not blank, follows the instruction."""
        ...


class Relation(StrEnum):
    """Comparisons of a count: the first two occur in IFEval's data, the others in RLVR-IFeval's."""

    AT_LEAST = "at least"
    LESS_THAN = "less than"
    AT_MOST = "at most"
    AROUND = "around"
    """Differs from the wanted count by at most 10 percent, or at most one."""
    EXACTLY = "exactly"

    def holds(self, count: int, wanted: int) -> bool:
        """Return whether the count satisfies the comparison."""
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
