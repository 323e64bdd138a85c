"""Which instructions an answer follows, strictly or loosely, and what that is worth.

Loosely as in IFEval (Zhou et al. 2023, section 2.3): an instruction is followed if the answer follows it, or what is
left of it without its first line, its last line, or both, each with and without its asterisks. A blank text follows
nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pipelinerl.instructions.catalogue import Asked


class Matching(StrEnum):
    """How exactly an answer is taken."""

    STRICT = "strict"
    LOOSE = "loose"


class Score(StrEnum):
    """What an answer that follows some of its instructions is worth."""

    SHARE = "share"
    """The share that it follows."""
    ALL = "all"
    """1 if it follows all of them, else 0."""

    def of(self, followed: Sequence[bool]) -> float:
        """The reward."""
        return sum(followed) / len(followed) if self is Score.SHARE else float(all(followed))


def followed(asked: Sequence[Asked], answer: str, matching: Matching = Matching.STRICT) -> list[bool]:
    """Whether the answer follows each of the instructions, in their order."""
    texts = [text for text in (variants(answer) if matching is Matching.LOOSE else [answer]) if text.strip()]
    return [any(each.instruction.follows(text) for text in texts) for each in asked]


def variants(answer: str) -> list[str]:
    """The eight texts that a loose score looks at, the answer itself first, those that are equal once."""
    lines = answer.split("\n")
    cuts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys(text for cut in cuts for text in (cut, cut.replace("*", ""))))
