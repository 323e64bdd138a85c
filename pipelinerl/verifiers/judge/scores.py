"""`ScoreFormat`: the form in which a judge is to give its score, and the parsing of the score from its reply.

A reply counts only if it contains exactly one score, a finite number within the range. A reply that repeats the judged
answer, or gives two scores, is discarded, so a score inside an answer cannot be counted.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from typing import Any, Final

#: Number of characters of a reply that are parsed; the rest of an endless reply is ignored.
_MOST_READ: Final = 50_000
_MOST_OBJECTS: Final = 200


class Unreadable(Exception):
    """A reply holds no valid score, or several; the message shows the reply's beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreFormat:
    """How a score from `low` to `high` is written: as JSON, or as the single group of a regular expression."""

    low: float
    high: float
    pattern: re.Pattern[str] | None = None

    @property
    def request(self) -> str:
        """Instruction to the judge about the form of its reply."""
        if self.pattern is not None:
            return f"Say the score, a number from {self.low:g} to {self.high:g}, once, in the form asked for."
        return (
            "Reply with one JSON object and nothing else: "
            f'{{"reason": "<one sentence>", "score": <number from {self.low:g} to {self.high:g}>}}'
        )

    def read(self, reply: str) -> tuple[float, str]:
        """Return the score, and the judge's reason or "".

        Raises:
            Unreadable: there is not exactly one score within the range.
        """
        scores = self._by_pattern(reply) if self.pattern is not None else _in_json(reply[:_MOST_READ])
        if not scores:
            raise Unreadable(f"the judge said no score: {reply[:200]!r}")
        if len({score for score, _ in scores}) > 1:
            listed = ", ".join(f"{score:g}" for score, _ in scores[:5])
            raise Unreadable(f"the judge said more than one score: {listed}")
        score, reason = scores[-1]
        if not self.low <= score <= self.high:
            raise Unreadable(f"the judge said the score {score:g}, which is not from {self.low:g} to {self.high:g}")
        return score, reason

    def share(self, score: float) -> float:
        """Return the score mapped to 0…1."""
        return (score - self.low) / (self.high - self.low)

    def _by_pattern(self, reply: str) -> list[tuple[float, str]]:
        assert self.pattern is not None
        scores = []
        for match in self.pattern.finditer(reply[:_MOST_READ]):
            try:
                scores.append((float(match[1]), ""))
            except (TypeError, ValueError):
                raise Unreadable(f"the judge said {match[1]!r} for a score, which is no number") from None
        return [each for each in scores if math.isfinite(each[0])]


def _in_json(reply: str) -> list[tuple[float, str]]:
    """Return score and reason of every JSON object with a score, anywhere in the reply."""
    decoder, place = json.JSONDecoder(), 0
    scores: list[tuple[float, str]] = []
    for _ in range(_MOST_OBJECTS):
        place = reply.find("{", place)
        if place < 0:
            return scores
        try:
            value, place = decoder.raw_decode(reply, place)
        except (ValueError, RecursionError):
            place += 1
            continue
        score = _number(value.get("score"))
        if score is not None:
            reason = value.get("reason")
            scores.append((score, reason if isinstance(reason, str) else ""))
    raise Unreadable(f"the judge said more than {_MOST_OBJECTS} braces and no end of them")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
