"""Comparison of a program's output with the expected answer, by a built-in rule or by the problem's own checker.

    exact    the same lines, apart from spaces at their ends and empty lines at the end
    tokens   the same words
    float    the same words, where numbers may differ by `tolerance`, absolute or relative, but two integers may not
    custom   the problem's own program, in its own guest

A custom checker uses one of two protocols. `testlib`: the checker gets the files of input, output and answer, and exits
with 0 for right, 1, 2, 4 or 8 for wrong, and 7 for partial points. Any other exit is a failure of the checker.
`printed`: the checker gets the files of input, answer and output, and prints the share of the points, from 0 to 1.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.repository import Content
from pipelinerl.plugins.oubliette.runs import Ending, Limits, ProgramResult, Run
from pipelinerl.plugins.oubliette.toolchains import COMPILING


class Checker(StrEnum):
    """Built-in rule for comparing outputs with answers."""

    EXACT = "exact"
    TOKENS = "tokens"
    FLOAT = "float"


class Scoring(StrEnum):
    """Rule that computes the reward from the tests."""

    ALL = "all"
    """1 if the program passes every test, else 0."""
    SHARE = "share"
    """The share of tests that the program passes."""


class Protocol(StrEnum):
    """Calling convention of a custom checker."""

    TESTLIB = "testlib"
    PRINTED = "printed"


#: Pattern of the names that a checker's files may have.
FILE_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")


class CheckerFailed(Exception):
    """A custom checker failed; this does not mean that the answer is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CustomChecker:
    """A problem's own checker: its source with accompanying `files`, such as testlib.h, or the compiled `program`."""

    language: str
    source: str
    protocol: Protocol
    files: tuple[tuple[str, str], ...] = ()
    program: Content | None = None

    @property
    def key(self) -> str:
        """Digest of everything that the compiled program depends on. Raises `ToolchainMissing`."""
        parts = (toolchains.find(self.language), self.source, self.files)
        return hashlib.blake2b(repr(parts).encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()

    def compiling(self) -> Run | None:
        """Return the run that compiles the checker, or None if its language needs no compiling."""
        run = toolchains.find(self.language).compiling(self.source, COMPILING)
        if run is None:
            return None
        return replace(run, files=(*run.files, *((name, text.encode()) for name, text in self.files)))

    def checking(self, program: bytes, stdin: bytes, stdout: bytes, answer: bytes) -> Run:
        """Return the run in which the compiled checker `program` judges one output."""
        run = toolchains.find(self.language).running(program, b"", _LIMITS)
        given = ("input.txt", "output.txt", "answer.txt")
        if self.protocol is Protocol.PRINTED:
            given = ("input.txt", "answer.txt", "output.txt")
        files = (("input.txt", stdin), ("output.txt", stdout), ("answer.txt", answer))
        return replace(run, files=(*run.files, *files), arguments=given)

    def share(self, result: ProgramResult) -> float:
        """Return the share of points, 0 to 1, that a `checking` run gave. Raises `CheckerFailed` if it gave none."""
        if result.ending is not Ending.EXITED:
            raise CheckerFailed(f"the problem's checker {result.describe()}")
        if self.protocol is Protocol.TESTLIB:
            raised = self.language == "python" and result.code == 1 and _RAISED in result.stderr
            if result.code == 0:
                return 1.0
            if result.code in _WRONG_BY_TESTLIB and not raised:
                return 0.0
            points = _POINTS.search(result.stderr)
            if result.code == _POINTS_BY_TESTLIB and points is not None:
                return min(1.0, float(points[1]))
            raise CheckerFailed(f"the problem's checker failed: {result.describe()}")
        match = _NUMBER.fullmatch(result.stdout.decode("utf-8", "replace").strip())
        if result.code != 0 or match is None or not 0 <= float(match[0]) <= 1:
            raise CheckerFailed(
                f"the problem's checker must print a number from 0 to 1, it printed {result.stdout[:80]!r} "
                f"and ended: {result.describe()}"
            )
        return float(match[0])


_LIMITS: Final = Limits(cpu_s=10.0, wall_s=30.0, output_bytes=64 << 10, disk_bytes=256 << 20)
_NUMBER: Final = re.compile(r"[0-9]{1,9}(?:\.[0-9]{1,17})?")
_POINTS: Final = re.compile(rb"(?:partially correct|points)\D{0,20}([0-9]{1,9}(?:\.[0-9]{1,17})?)")
#: Text that a checker in Python prints if it raises an exception. Its exit status is then 1, as for a wrong answer.
_RAISED: Final = b"Traceback (most recent call last):"
_WRONG_BY_TESTLIB: Final = (1, 2, 4, 8)
_POINTS_BY_TESTLIB: Final = 7


def same(output: bytes, answer: bytes, checker: Checker, tolerance: float) -> bool:
    """Return whether the output matches the answer."""
    if checker is Checker.EXACT:
        return _lines(output) == _lines(answer)
    ours, theirs = output.split(), answer.split()
    if ours == theirs or checker is Checker.TOKENS or len(ours) != len(theirs):
        return ours == theirs
    return all(a == b or _close(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _lines(text: bytes) -> list[bytes]:
    lines = [line.rstrip() for line in text.split(b"\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def _close(output: bytes, answer: bytes, tolerance: float) -> bool:
    """Return whether two numbers differ by at most `tolerance`, absolute or relative; False for NaN."""
    if _INTEGER.fullmatch(output) and _INTEGER.fullmatch(answer):
        return _integer(output) == _integer(answer)
    if len(output) > _LONGEST_NUMBER or b"_" in output + answer:
        return False
    try:
        ours, theirs = float(output), float(answer)
    except ValueError:
        return False
    if not (math.isfinite(ours) and math.isfinite(theirs)):
        # Numbers such as 1e400 become infinity, so infinity is accepted only if neither text has digits.
        return ours == theirs and not _DIGIT.search(output + answer)
    return abs(ours - theirs) <= tolerance * max(1.0, abs(theirs))


def _integer(digits: bytes) -> bytes:
    # Not `int`, which rejects more than 4300 digits.
    size = digits.lstrip(b"+-").lstrip(b"0")
    return b"-" + size if digits.startswith(b"-") and size else size


_INTEGER: Final = re.compile(rb"[+-]?[0-9]+")
_LONGEST_NUMBER: Final = 400
_DIGIT: Final = re.compile(rb"[0-9]")
