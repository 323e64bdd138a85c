"""What the sample log holds: groups of answers to one problem, each a line of JSON of a bounded length.

A text that is too long keeps its beginning and its end, between them a note of how much is missing; `length` counts the
tokens all the same. What a model wrote is kept as it is: `visible` makes it harmless to look at.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

#: Most characters of a text that are kept.
MOST_CHARACTERS: Final = 8000


class SampleKind(StrEnum):
    """Where a group of answers belongs."""

    TRAINED = "trained"
    """It was part of a step."""
    FILTERED = "filtered"
    """It was not, for the reason that `why` gives; one stands for all that were filtered since the step before."""
    EVALUATION = "evaluation"
    """It answers a held-out problem."""


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer and what became of it.

    Attributes:
        text: what the model wrote, special tokens included where the trainer knows them.
        outcome, reason, reward, parts: the verifier's; `parts` are named rewards before their weights. The reward of an
            answer that was not judged, and one that is no finite number, is None.
        shaped: the reward that advantages are computed from. advantage: mean over its tokens.
        length: tokens sampled. spans: (model version, tokens), in order. staleness: in versions.
        trained: did it have a gradient in its step?
    """

    text: str
    outcome: str
    reward: float | None = None
    reason: str = ""
    parts: tuple[tuple[str, float], ...] = ()
    shaped: float | None = None
    advantage: float | None = None
    length: int = 0
    finish_reason: str = ""
    spans: tuple[tuple[int, int], ...] = ()
    staleness: int | None = None
    trained: bool = False


class SampleGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answers to one problem.

    Attributes:
        step: the version that its step made, or that was evaluated.
        time: in Unix seconds.
        evaluation: the name of the evaluation set that asks the problem.
        filtered: of a filtered group, how many groups were filtered since the step before, by reason.
    """

    kind: SampleKind
    step: int
    time: float
    group_id: str
    domain: str
    problem_id: str = ""
    tags: tuple[str, ...] = ()
    prompt: str
    ground_truth: str = ""
    answers: tuple[AnswerRecord, ...]
    why: str = ""
    evaluation: str = ""
    filtered: dict[str, int] = {}


_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(SampleGroup)


def shortened(text: str, most: int) -> str:
    """The text, or of a longer one three quarters of `most` from its beginning and a quarter from its end."""
    if len(text) <= most:
        return text
    end = most // 4
    left_out = f" […{len(text) - most:,} characters left out…] "
    return text[: most - end] + left_out + (text[-end:] if end else "")


def encode(group: SampleGroup, *, most_bytes: int) -> bytes | None:
    """A line of at most `most_bytes`, its end included; None where no shortening makes it fit."""
    most = MOST_CHARACTERS
    while True:
        line = _ENCODER.encode(_shortened(msgspec.to_builtins(group), most)) + b"\n"
        if len(line) <= most_bytes:
            return line
        if most == 0:
            return None
        most //= 2


def decode(line: bytes) -> SampleGroup | None:
    """The group of a line; None of one that was torn, or that nobody here wrote."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _shortened(value: Any, most: int) -> Any:
    """Plain values with every text cut; numbers that JSON cannot say become null."""
    if isinstance(value, str):
        return shortened(value, most).encode(errors="replace").decode()  # half of a surrogate pair is no text
    if isinstance(value, dict):
        return {_shortened(key, most): _shortened(item, most) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_shortened(item, most) for item in value]
    return value
