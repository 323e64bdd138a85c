"""The sample log of a run: its records, the writer `SampleLog`, and its readers.

    <run>/samples/  training-000001.jsonl, training-000002.jsonl, … · evaluation-000001.jsonl, …

Each line is a group of answers to one problem, of bounded length. Of a text that is too long, the beginning and the end
are kept, and a note in the middle says how much is missing; `length` still counts all tokens. Model output is stored
unchanged; `visible` makes it safe to display.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import unicodedata
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

log = logging.getLogger("pipelinerl")

FOLDER: Final = "samples"
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


# --- writing ----------------------------------------------------------------------------------------------------------

#: The byte limit is divided among this many files.
_FILES: Final = 8
#: Maximum length of the queue of `put` calls that wait for the writer thread.
_WAITING: Final = 256

#: Exceptions that building a sample may raise; tokenizers raise these, including pyo3's "already borrowed".
_BUILD_ERRORS: Final = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)

#: A function that builds the groups to write; the writer thread calls it.
Make = Callable[[], Iterable[SampleGroup]]


class SampleLog:
    """One writer of the files `<name>-*.jsonl` in a directory, which it creates when needed: a background thread.

    - `put` never blocks, not even on the disk. Samples that arrive faster than they are written are dropped and
      counted.
    - All files of one log (such as `training`) together never exceed `max_bytes`: the oldest is removed before a new
      one begins.
    - A line is written in one piece and never changed. A killed writer may leave an incomplete last line, which readers
      skip; the next writer starts a new file.
    - If the disk is full, or a sample cannot be built, only samples are lost: the run continues.
    """

    def __init__(self, directory: Path, name: str, *, max_bytes: int) -> None:
        """Start the writer thread; `max_bytes` limits the total size of the files."""
        self._directory = directory
        self._name = name
        self._max_bytes = max_bytes
        self._file_bytes = max_bytes // _FILES
        self._file = -1
        self._written = 0
        self._queue: queue.SimpleQueue[Make | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write_all, name=f"samples-{name}", daemon=True)
        self._warned = False
        self.left_out = 0
        """Number of `put` calls dropped for a full queue or an error, plus the number of groups too long for a file."""
        self._thread.start()

    def put(self, make: Make) -> None:
        """Queue `make` for the writer thread, which calls it and writes the groups that it returns, in order."""
        if self._queue.qsize() >= _WAITING:
            self.left_out += 1
        else:
            self._queue.put(make)

    def close(self, *, timeout_s: float = 5.0) -> None:
        """Write the queued samples and stop the thread, within `timeout_s` seconds."""
        self._queue.put(None)
        self._thread.join(timeout_s)

    def _write_all(self) -> None:
        while (make := self._queue.get()) is not None:
            try:
                for group in make():
                    self._write(group)
            except OSError as error:
                self._leave_out("samples cannot be written to %s: %s; the run continues", self._directory, error)
            except _BUILD_ERRORS as error:
                self._leave_out("a sample cannot be built: %s: %s; the run continues", type(error).__name__, error)
        self._close_file()

    def _leave_out(self, why: str, *arguments: object) -> None:
        self.left_out += 1
        if not self._warned:
            log.warning(why, *arguments, exc_info=log.isEnabledFor(logging.DEBUG))
        self._warned = True

    def _write(self, group: SampleGroup) -> None:
        line = encode(group, most_bytes=self._file_bytes)
        if line is None:
            self.left_out += 1
            return
        if self._file < 0 or self._written + len(line) > self._file_bytes:
            self._begin_file()
        self._written += len(line)  # count before writing, since a full disk may leave part of the line in the file
        if os.write(self._file, line) < len(line):
            self._close_file()

    def _begin_file(self) -> None:
        self._close_file()
        self._directory.mkdir(parents=True, exist_ok=True)
        files = sorted(self._directory.glob(f"{self._name}-*.jsonl"))
        numbers = (path.stem.rpartition("-")[2] for path in files)
        number = max((int(number) for number in numbers if number.isdecimal()), default=0) + 1
        sizes = {path: path.stat().st_size for path in files if path.exists()}
        for path in list(sizes):
            if sum(sizes.values()) + self._file_bytes <= self._max_bytes:
                break
            path.unlink(missing_ok=True)
            del sizes[path]
        path = self._directory / f"{self._name}-{number:06d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._written = 0

    def _close_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


# --- reading: of a live, finished or crashed run ----------------------------------------------------------------------

#: The finish reason of an answer that hit the token limit.
LENGTH: Final = "length"


class Ranking(StrEnum):
    """The order in which samples are selected if their number is limited."""

    NEWEST = "newest"
    WORST = "worst"
    """Lowest reward first."""
    BEST = "best"
    """Highest reward first. Unjudged answers are neither best nor worst."""


class ChosenSample(NamedTuple):
    """An answer and its group."""

    group: SampleGroup
    answer: AnswerRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleQuery:
    """Criteria that samples must match; a criterion of None matches any. `limit` bounds the number of answers."""

    kinds: frozenset[SampleKind] = frozenset((SampleKind.TRAINED,))
    step: int | None = None
    domain: str | None = None
    tag: str | None = None
    evaluation: str | None = None
    finish_reason: str | None = None
    ranking: Ranking = Ranking.NEWEST
    limit: int | None = None

    def choose(self, groups: Iterable[SampleGroup]) -> list[ChosenSample]:
        """Return the last `limit` matching samples as given or, for BEST and WORST, the first judged ones by reward."""
        matching = [
            ChosenSample(group, answer)
            for group in groups
            if group.kind in self.kinds
            and self.step in (None, group.step)
            and self.domain in (None, group.domain)
            and self.evaluation in (None, group.evaluation)
            and (self.tag is None or self.tag in group.tags)
            for answer in group.answers
            if self.finish_reason in (None, answer.finish_reason)
        ]
        if self.ranking is Ranking.NEWEST:
            return matching if self.limit is None else matching[len(matching) - min(self.limit, len(matching)) :]
        sign = 1 if self.ranking is Ranking.WORST else -1
        judged = [
            (sign * each.answer.reward, -each.group.step, each) for each in matching if each.answer.reward is not None
        ]
        return [each for _, _, each in sorted(judged, key=itemgetter(0, 1))][: self.limit]


class SampleReader:
    """Incremental reader of a run's sample files; each call continues at the last position."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offsets: dict[str, int] = {}

    def new(self) -> list[SampleGroup]:
        groups: list[SampleGroup] = []
        for path in sorted(sample_files(self._run_dir)):
            offset = self._offsets.get(path.name, 0)
            with suppress(FileNotFoundError), path.open("rb") as file:
                file.seek(offset)
                data = file.read()
                whole = data.rfind(b"\n") + 1
                self._offsets[path.name] = offset + whole
                decoded = map(decode, data[:whole].split(b"\n")[:-1])
                groups += [group for group in decoded if group is not None]
        return sorted(groups, key=lambda group: group.time)


def sample_files(run_dir: Path) -> list[Path]:
    """Return the run's sample files, oldest first within each kind."""
    return sorted((run_dir / FOLDER).glob("*.jsonl"), key=lambda path: (path.stem.rpartition("-")[2], path.name))


def read_samples(run_dir: Path) -> list[SampleGroup]:
    """Return all groups in the log's files, sorted by time; of a repeated step, only the last samples."""
    latest = {(group.kind, group.step, group.group_id): group for group in SampleReader(run_dir).new()}
    return sorted(latest.values(), key=lambda group: group.time)
