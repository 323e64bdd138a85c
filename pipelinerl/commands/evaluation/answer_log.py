"""`AnswerLog`: a file of answers to one question, which a command that was interrupted goes on from.

Its first line says what was asked, as JSON, and each line after it is an answer. Promises: an answer that was added is
there however the process ends; a line that was torn is no answer; answers to another question are refused, and so is a
second writer.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, final

import msgspec

from pipelinerl.errors import UserError

Answer = TypeVar("Answer", bound=msgspec.Struct)


@final
class AnswerLog(Generic[Answer]):
    """The answers that are there, and those that come."""

    def __init__(self, file: BinaryIO, answers: list[Answer]) -> None:
        self._file = file
        self.answers = answers
        """In the order in which they came."""

    def add(self, answer: Answer) -> None:
        """It is written before it counts."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        self.answers.append(answer)


@contextmanager
def answer_log(path: Path, question: Mapping[str, Any], of: type[Answer]) -> Iterator[AnswerLog[Answer]]:
    """The log in the file `path`, which is made where there is none, until the block ends.

    Raises:
        UserError: the file holds answers to another question, is damaged, cannot be written, or another process has it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; name another --out") from None
    with os.fdopen(descriptor, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"another process writes {path}; wait for its end, or name another --out") from None
        yield AnswerLog(file, _read(file, path, dict(question), of))


def _read(file: BinaryIO, path: Path, question: dict[str, Any], of: type[Answer]) -> list[Answer]:
    """The answers in the file, which then says the question and ends with a whole line."""
    data, first = file.read(), json.dumps(question).encode() + b"\n"
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    if not lines and first.startswith(data):  # it is new, or it was killed as it began
        file.write(first[len(data) :])
        file.flush()
        return []
    if asked := _differing(lines, question):
        raise UserError(
            f"{path} holds answers to another question (another {', '.join(asked)}); name another --out, or remove it"
        )
    file.truncate(data.rfind(b"\n") + 1)  # a line that was torn as it was killed: that problem is asked again
    try:
        return [msgspec.json.decode(line, type=of) for line in lines[1:]]
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged: {error}; remove it, or name another --out") from None


def _differing(lines: list[bytes], question: dict[str, Any]) -> list[str]:
    """What the file's first line has otherwise."""
    try:
        asked = json.loads(lines[0])
    except (ValueError, IndexError):
        asked = None
    if asked == question:
        return []
    said = asked if isinstance(asked, dict) else {}
    return [name for name in {**question, **said} if name not in said or said[name] != question.get(name)]
