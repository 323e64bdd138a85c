"""`AnswerLog`: a file of results from which an interrupted command resumes.

Its first line is the question: a JSON object with every setting on which the results depend. Each further line is the
result of one problem. Guarantees: an added result survives any end of the process. A torn line is ignored. Results of
another question are refused, and so is a second process that writes the file.
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
    """The results in the file and those added since it was opened."""

    def __init__(self, file: BinaryIO, answers: list[Answer]) -> None:
        self._file = file
        self.answers = answers
        """In order of arrival."""

    def add(self, answer: Answer) -> None:
        """Write a result to the file, then add it to `answers`."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()
        self.answers.append(answer)


@contextmanager
def answer_log(path: Path, question: Mapping[str, Any], of: type[Answer]) -> Iterator[AnswerLog[Answer]]:
    """Open the log in the file `path` for the duration of the block, creating it if missing.

    Raises:
        UserError: the file holds results of another question, is damaged, or cannot be written or locked.
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
    """Return the results in the file. Write the question into a new file, and cut off a torn last line."""
    data, first = file.read(), json.dumps(question).encode() + b"\n"
    lines = data[: data.rfind(b"\n") + 1].splitlines()
    if not lines and first.startswith(data):  # new file, or the writer was killed in the first line
        file.write(first[len(data) :])
        file.flush()
        return []
    if other := _differing(lines, question):
        raise UserError(
            f"{path} holds answers to another question (another {', '.join(other)}); name another --out, or remove it"
        )
    file.truncate(data.rfind(b"\n") + 1)  # drop a torn line; its problem is evaluated again
    try:
        return [msgspec.json.decode(line, type=of) for line in lines[1:]]
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is damaged: {error}; remove it, or name another --out") from None


def _differing(lines: list[bytes], question: dict[str, Any]) -> list[str]:
    """Return the settings in which the question in the file differs from `question`."""
    try:
        logged = json.loads(lines[0])
    except (ValueError, IndexError):
        logged = None
    if logged == question:
        return []
    known = logged if isinstance(logged, dict) else {}
    return [name for name in {**question, **known} if name not in known or known[name] != question.get(name)]
