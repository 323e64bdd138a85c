"""What the sample log holds: groups of answers to one problem, each a line of JSON of a bounded length.

A text that is too long keeps its beginning and its end, between them a note of how much is missing; `length` counts the
tokens all the same. What a model wrote is kept as it is: `visible` makes it harmless to look at.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

#: Most characters of a text that are kept.
MOST_CHARACTERS: Final = 8000
#: Most tokens of a prompt, and of an answer, that are kept beside their texts: a quarter of that many.
_CHARACTERS_OF_TOKEN: Final = 4


class SampleKind(StrEnum):
    """Where a group of answers belongs."""

    TRAINED = "trained"
    """It was part of a step."""
    FILTERED = "filtered"
    """It was not, for the reason that `why` gives; one stands for all that were filtered since the step before."""
    EVALUATION = "evaluation"
    """It answers a held-out problem."""


class TokenTexts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Tokens as they were recorded, never tokenised again: ids and the text of each, [T].

    Of more than are kept, `left_out` are missing from place `at` on.
    """

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    left_out: int = 0
    at: int = 0


class AnswerTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of an answer, and of each what is known; columns [T], None where it has no meaning.

    Attributes:
        tokens: all after the prompt: what was sampled and, of several turns, what the environment wrote between.
        versions: of the weights that sampled each; None for what the environment wrote.
        logprobs: the sampler's. deltas: the trainer's at the step, less the sampler's; empty where it had no gradient.
        advantages: likewise. entropies: of the trainer's distribution that each was chosen from, at the step, in nats;
            empty of most answers, since few are measured.
    """

    tokens: TokenTexts
    versions: tuple[int | None, ...] = ()
    logprobs: tuple[float | None, ...] = ()
    deltas: tuple[float | None, ...] = ()
    advantages: tuple[float | None, ...] = ()
    entropies: tuple[float | None, ...] = ()


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One turn of an episode.

    Attributes:
        context: what the turn continues with before the model answers: messages of the environment and results of
            tools or, where a conversation begins, its whole prompt; empty where that is the group's prompt.
        text: what the model wrote.
        agent: who asked. length: tokens sampled. reward: the environment's, for this turn.
        segment: the segment in which the turn trains, from 1. begins: why a segment begins with it.
        continues: the number of the turn that it continues, from 1; 0 where a conversation begins.
    """

    context: str = ""
    text: str
    agent: str = ""
    length: int = 0
    reward: float = 0.0
    segment: int = 1
    begins: str = ""
    continues: int = 0


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One answer and what became of it.

    Attributes:
        text: what the model wrote, special tokens included where the trainer knows them.
        outcome, reason, reward, parts: the verifier's; `parts` are named rewards before their weights. The reward of an
            answer that was not judged, and one that is no finite number, is None.
        shaped: the reward that advantages are computed from. advantage: mean over its tokens.
        length: tokens sampled. spans: (model version, tokens), in order. staleness: in versions.
        trained: did it have a gradient in its step?
        tokens: None where they are not recorded: an evaluation's, and those of older runs.
        turns: of an episode, in the order in which they ended; empty of a single answer.
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
    tokens: AnswerTokens | None = None
    turns: tuple[TurnRecord, ...] = ()


class SampleGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answers to one problem.

    Attributes:
        step: the version that its step made, or that was evaluated.
        time: in Unix seconds.
        evaluation: the name of the evaluation set that asks the problem.
        filtered: of a filtered group, how many groups were filtered since the step before, by reason.
        prompt_tokens: None where they are not recorded.
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
    prompt_tokens: TokenTexts | None = None


T = TypeVar("T")

#: What stays as it is.
_NUMBERS: Final = frozenset({int, float, bool, type(None)})

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
        line = _ENCODER.encode(_written(group, most)) + b"\n"
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


def _written(group: SampleGroup, most: int) -> dict[str, Any]:
    """The group as it is written, its texts cut to `most` characters and its tokens to a quarter as many."""
    replace, tokens = msgspec.structs.replace, most // _CHARACTERS_OF_TOKEN
    bare = replace(group, prompt_tokens=None, answers=tuple(replace(each, tokens=None) for each in group.answers))
    written: dict[str, Any] = _shortened(msgspec.to_builtins(bare), most)
    if not tokens:
        return written
    if group.prompt_tokens is not None:
        written["prompt_tokens"] = _cut_tokens(group.prompt_tokens, tokens)
    for each, answer in zip(written["answers"], group.answers, strict=True):
        if answer.tokens is not None:
            each["tokens"] = _cut_answer(answer.tokens, tokens)
    return written


def _cut_tokens(tokens: TokenTexts, most: int) -> TokenTexts:
    """Three quarters of `most` from the beginning and a quarter from the end, as of texts."""
    return TokenTexts(
        ids=_cut(tokens.ids, most),
        texts=_cut(tokens.texts, most),
        left_out=max(0, len(tokens.ids) - most),
        at=most - most // 4 if len(tokens.ids) > most else 0,
    )


def _cut_answer(answer: AnswerTokens, most: int) -> AnswerTokens:
    return AnswerTokens(
        tokens=_cut_tokens(answer.tokens, most),
        versions=_cut(answer.versions, most),
        logprobs=_cut(answer.logprobs, most),
        deltas=_cut(answer.deltas, most),
        advantages=_cut(answer.advantages, most),
        entropies=_cut(answer.entropies, most),
    )


def _cut(column: tuple[T, ...], most: int) -> tuple[T, ...]:
    end = most // 4
    return column if len(column) <= most else column[: most - end] + column[len(column) - end :]


def _shortened(value: Any, most: int) -> Any:
    """Plain values with every text cut; numbers that JSON cannot say become null."""
    kind = type(value)
    if kind is str:
        cut = shortened(value, most)
        return cut if cut.isascii() else cut.encode(errors="replace").decode()  # half of a surrogate pair is no text
    if kind is dict:
        return {
            key if len(key) <= most and key.isascii() else _shortened(key, most): (
                item if type(item) in _NUMBERS else _shortened(item, most)
            )
            for key, item in value.items()
        }
    if kind is list or kind is tuple:
        return [item if type(item) in _NUMBERS else _shortened(item, most) for item in value]
    return value
