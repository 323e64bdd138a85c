"""Records of the sample log: groups of answers to one problem, each a JSON line of bounded length.

Of a text that is too long, the beginning and the end are kept, and a note in the middle says how much is missing;
`length` still counts all tokens. Model output is stored unchanged; `visible` makes it safe to display.
"""

from __future__ import annotations

import unicodedata
from enum import StrEnum
from typing import Any, Final, TypeVar

import msgspec

#: Maximum number of characters that are kept of a text.
MOST_CHARACTERS: Final = 8000
#: Assumed characters per token: of an answer, at most `MOST_CHARACTERS` / 4 tokens are kept.
_CHARACTERS_OF_TOKEN: Final = 4


class SampleKind(StrEnum):
    """The origin of a group of answers."""

    TRAINED = "trained"
    """Part of a training step."""
    FILTERED = "filtered"
    """Not trained, for the reason in `why`; of the groups filtered since the previous step, only one is kept."""
    EVALUATION = "evaluation"
    """Answers to a held-out problem."""


class TokenTexts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Ids and texts of tokens [T], as sampled and not re-tokenized; `left_out` tokens were removed at index `at`."""

    ids: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    left_out: int = 0
    at: int = 0


class AnswerTokens(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The tokens of an answer, with values per token in columns [T]; None where a value does not apply to a token.

    Attributes:
        tokens: all tokens after the prompt: sampled tokens and, in episodes, the environment's messages between turns.
        versions: version of the weights that sampled each token; None for the environment's tokens.
        deltas: the trainer's log-prob at the step minus the sampler's. Without a gradient for the answer, `deltas` and
            `advantages` are empty.
        entropies: entropy in nats of the trainer's distribution of each token, at the step; empty unless measured.
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
        context: input from the environment and tools since the turn in `continues`. In the first turn of a
            conversation, the prompt; empty if it equals the group's prompt.
        text: the model's output.
        agent: the agent that requested the turn. length: number of sampled tokens. reward: from the environment.
        segment: number, from 1, of the segment (token sequence) in which the turn trains.
        begins: the reason why a segment begins with this turn; empty if none does.
        continues: number, from 1, of the turn that this turn continues; 0 in the first turn of a conversation.
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
    """One answer and its results.

    Attributes:
        text: the model's output; in training samples, with special tokens.
        outcome, reason, reward, parts: from the verifier. `parts` are named rewards before weighting. `reward` is None
            if the verifier reached no verdict, or the reward is not finite.
        shaped: the reward from which advantages are computed. advantage: mean over the answer's tokens.
        length: number of sampled tokens. spans: (model version, number of tokens), in order. staleness: in versions.
        trained: True if the answer had a gradient in its step.
        tokens: None if not recorded, as in evaluations and older runs.
        turns: the turns of an episode, in the order in which they ended; empty for one answer to the group's prompt.
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

    `step` is the model version after training on the answers; in an evaluation, the evaluated version. `time` is in
    Unix seconds; `filtered` counts the groups that were filtered since the previous step, by reason.
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

_ENCODER: Final = msgspec.json.Encoder()
_DECODER: Final = msgspec.json.Decoder(SampleGroup)


def shortened(text: str, most: int) -> str:
    """Return `text`; if it is longer than `most`, its first ¾ · `most` characters, a note, and its last ¼ · `most`."""
    if len(text) <= most:
        return text
    end = most // 4
    left_out = f" […{len(text) - most:,} characters left out…] "
    return text[: most - end] + left_out + (text[-end:] if end else "")


def encode(group: SampleGroup, *, most_bytes: int) -> bytes | None:
    """Encode a group as a JSON line of at most `most_bytes`, with its newline; None if it cannot be made to fit."""
    most = MOST_CHARACTERS
    while True:
        line = _ENCODER.encode(_written(group, most)) + b"\n"
        if len(line) <= most_bytes:
            return line
        if most == 0:
            return None
        most //= 2


def decode(line: bytes) -> SampleGroup | None:
    """Decode a line of the sample log; None if the line is incomplete or in another format."""
    try:
        return _DECODER.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _written(group: SampleGroup, most: int) -> dict[str, Any]:
    replace, tokens = msgspec.structs.replace, most // _CHARACTERS_OF_TOKEN
    bare = replace(group, prompt_tokens=None, answers=tuple(replace(each, tokens=None) for each in group.answers))
    written: dict[str, Any] = _shortened(msgspec.to_builtins(bare), most)
    if not tokens:
        return written
    if group.prompt_tokens is not None:
        written["prompt_tokens"] = _cut_tokens(group.prompt_tokens, tokens)
    for each, answer in zip(written["answers"], group.answers, strict=True):
        if answer.tokens is not None:
            columns = msgspec.structs.asdict(answer.tokens)
            kept = _cut_tokens(columns.pop("tokens"), tokens)
            each["tokens"] = AnswerTokens(
                tokens=kept, **{name: _cut(column, tokens) for name, column in columns.items()}
            )
    return written


def _cut_tokens(tokens: TokenTexts, most: int) -> TokenTexts:
    return TokenTexts(
        ids=_cut(tokens.ids, most),
        texts=_cut(tokens.texts, most),
        left_out=max(0, len(tokens.ids) - most),
        at=most - most // 4 if len(tokens.ids) > most else 0,
    )


def _cut(column: tuple[T, ...], most: int) -> tuple[T, ...]:
    end = most // 4
    return column if len(column) <= most else column[: most - end] + column[len(column) - end :]


def _shortened(value: Any, most: int) -> Any:
    """Shorten every text in a JSON value to `most` characters; lone surrogates (not valid in UTF-8) become `?`."""
    if isinstance(value, str):
        # Replace lone surrogates, which UTF-8 cannot encode.
        return shortened(value, most).encode(errors="replace").decode()
    if isinstance(value, dict):
        return {_shortened(key, most): _shortened(item, most) for key, item in value.items()}
    return [_shortened(item, most) for item in value] if isinstance(value, list | tuple) else value


# --- safe display -----------------------------------------------------------------------------------------------------
#
# `visible` makes model output safe to display on a terminal and in a page. Model output is untrusted. Escape sequences
# can move the cursor or rename the window, direction marks can make a wrong answer read as the right one, and
# zero-width characters can make two texts look alike. All of these are shown as Python's escapes and have no effect.

#: Ordinary layout characters, which `visible` leaves unchanged.
_LAYOUT: Final = frozenset("\n\t")
#: Unicode categories that `visible` escapes: control, format, surrogates, private use, unassigned, line separators.
_HIDDEN: Final = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))


def visible(text: str) -> str:
    r"""Replace every invisible character but newlines and tabs by an escape such as `\x1b` or `\u202e`."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(character) for character in text)


def one_line(text: str) -> str:
    """Return the text as `visible` shows it, with newlines and tabs escaped as well; for names in a list."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _shown(character: str) -> str:
    if character in _LAYOUT or unicodedata.category(character) not in _HIDDEN:
        return character
    number = ord(character)
    if number < 0x100:
        return f"\\x{number:02x}"
    return f"\\u{number:04x}" if number < 0x10000 else f"\\U{number:08x}"
