"""Scoring of an answer by the instructions that it follows, strictly or loosely.

Loose matching is IFEval's (Zhou et al. 2023, section 2.3): an instruction counts as followed if any variant of the
answer follows it. The variants lack the first line, the last line, both or neither, each with and without asterisks. A
blank text follows no instruction.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from pipelinerl.instructions.catalogue import Asked


class Matching(StrEnum):
    """Strictness of the match between answers and instructions."""

    STRICT = "strict"
    LOOSE = "loose"


class Score(StrEnum):
    """Reward of an answer that follows some of its instructions."""

    SHARE = "share"
    """The share of instructions that the answer follows."""
    ALL = "all"
    """1 if the answer follows all instructions, else 0."""

    def of(self, followed: Sequence[bool]) -> float:
        """Return the reward; `followed` says for each instruction whether the answer follows it."""
        return sum(followed) / len(followed) if self is Score.SHARE else float(all(followed))


def followed(asked: Sequence[Asked], answer: str, matching: Matching = Matching.STRICT) -> list[bool]:
    """Return for each instruction, in order, whether the answer follows it."""
    texts = [text for text in (variants(answer) if matching is Matching.LOOSE else [answer]) if text.strip()]
    return [any(each.instruction.follows(text) for text in texts) for each in asked]


def variants(answer: str) -> list[str]:
    """Return the up to eight distinct texts that loose matching tries, the answer itself first."""
    lines = answer.split("\n")
    cuts = [answer, *("\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1]))]
    return list(dict.fromkeys(text for cut in cuts for text in (cut, cut.replace("*", ""))))
