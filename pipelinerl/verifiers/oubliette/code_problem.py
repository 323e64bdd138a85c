"""`CodeProblem`: the tests in a problem's metadata; and extraction of code from answers.

The metadata has the layout of one of these data sets:

    {"tests": [{"input", "output"}, …]}                                    ours; open-r1/codeforces as `official_tests`
    {"public_tests": {"input": […], "output": […]}, "private_tests": …}    deepmind/code_contests, `generated_tests` too
    {"input_output": {"inputs": […], "outputs": […]}}                      APPS and TACO, also as JSON in a text
    {"public_test_cases": [{"input", "output", "testtype": "stdin"}]}      LiveCodeBench, also as JSON in a text

If it has no tests, the ground truth may hold tests as JSON, as a list of pairs or as two lists. An input or output may
be a link into a repository: {"link": "oub:…"}. `time_limit` is in seconds (or code_contests' {"seconds", "nanos"}),
`memory_limit` in MB (`memory_limit_bytes` in bytes). `checker` names a built-in rule or holds a program;
open-r1/codeforces has a `generated_checker`, in Python.

Tests that call a function are rejected: programs read standard input and write standard output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pipelinerl.types import Problem
from pipelinerl.verifiers.oubliette import toolchains
from pipelinerl.verifiers.oubliette.checkers import FILE_NAME, Checker, CustomChecker, Protocol
from pipelinerl.verifiers.oubliette.repository import LINK, Content, Link

#: Field of an uploaded checker's metadata that links to its compiled program.
PROGRAM: Final = "program"


class TestsMalformed(Exception):
    """A problem's tests or other metadata are invalid."""

    __test__ = False  # keeps pytest from collecting it as a test class


@dataclass(frozen=True, slots=True)
class CodeTest:
    """A program's input and expected output: the bytes, or links to them."""

    input: Content
    answer: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeProblem:
    """Tests, limits and checker of a problem; None means that the recipe decides."""

    tests: tuple[CodeTest, ...]
    time_limit_s: float | None = None
    memory_bytes: int | None = None
    checker: Checker | CustomChecker | None = None

    @classmethod
    def of(cls, problem: Problem) -> CodeProblem:
        """Parse a problem's metadata. Raises `TestsMalformed` if there are no tests, or a field is invalid."""
        metadata = problem.metadata
        if metadata.get("interaction_format"):
            raise TestsMalformed("the problem is interactive; only standard input and output can be tested")
        if metadata.get("input_mode", "stdio") not in (None, "stdio"):
            raise TestsMalformed(f"input_mode must be stdio, got {_shown(metadata['input_mode'])}")
        tests = tuple(_tests(metadata)) or tuple(_of_ground_truth(problem.ground_truth))
        if not tests:
            raise TestsMalformed(
                f"{problem.problem_id} has no tests: its metadata must have one of {', '.join(_READERS)}, it has "
                f"{', '.join(metadata) or 'nothing'}; name the field in metadata_fields"
            )
        return cls(
            tests=tests,
            time_limit_s=_seconds(metadata.get("time_limit")),
            memory_bytes=_memory(metadata),
            checker=_checker(metadata),
        )


_FENCE: Final = re.compile(r"[ \t]*(`{3,}|~{3,})[ \t]*([^\s`]*)[^\n]*")
_LONGEST_CODE: Final = 1 << 20


def last_block(text: str) -> tuple[str, str] | None:
    """Return (language or "", code) of the last closed fenced block, or None; takes linear time."""
    last: tuple[str, str] | None = None
    fence, name, lines = "", "", list[str]()
    for line in text.splitlines(keepends=True):
        match = _FENCE.fullmatch(line.rstrip("\r\n"))
        if not fence:
            if match is not None:
                fence, name, lines = match[1], match[2], []
        elif match is not None and match[1].startswith(fence) and not match[2]:
            last, fence = (name, "".join(lines)), ""
        else:
            lines.append(line)
    return None if last is None or len(last[1]) > _LONGEST_CODE else last


# --- layouts ----------------------------------------------------------------------------------------------------------


def _tests(metadata: Mapping[str, Any]) -> Iterator[CodeTest]:
    for field, reader in _READERS.items():
        if field == "generated_tests" and isinstance(metadata.get(field), int):
            # In open-r1/codeforces, this field is only the number of tests, which are stored elsewhere.
            continue
        if metadata.get(field):
            yield from reader(field, _parsed(field, metadata[field]))


def _of_ground_truth(text: str) -> Iterator[CodeTest]:
    if text.lstrip()[:1] in ("[", "{"):
        parsed = _parsed("the answer", text)
        yield from (_pairs if isinstance(parsed, list) else _columns)("the answer", parsed)


def _parsed(field: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise TestsMalformed(f"{field} must be tests, or tests as JSON: {error}") from None


def _pairs(field: str, value: Any) -> Iterator[CodeTest]:
    if not isinstance(value, list | tuple):
        raise TestsMalformed(f"{field} must be a list of objects with input and output, got {_shown(value)}")
    for number, each in enumerate(value):
        if not isinstance(each, Mapping) or not {"input", "output"} <= each.keys():
            raise TestsMalformed(f"{field}[{number}] must have input and output, got {_shown(each)}")
        if each.get("testtype", "stdin") != "stdin":
            raise TestsMalformed(f"{field}[{number}] calls a function; only standard input and output can be tested")
        yield CodeTest(
            _content(f"{field}[{number}].input", each["input"]), _content(f"{field}[{number}].output", each["output"])
        )


def _columns(field: str, value: Any) -> Iterator[CodeTest]:
    if not isinstance(value, Mapping):
        raise TestsMalformed(f"{field} must be an object of two lists, got {_shown(value)}")
    if value.get("fn_name"):
        raise TestsMalformed(
            f"{field} calls the function {value['fn_name']}; only standard input and output can be tested"
        )
    inputs, outputs = (value.get(name, value.get(f"{name}s")) for name in ("input", "output"))
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        raise TestsMalformed(f"{field} must have as many inputs as outputs, in two lists, got {_shown(value)}")
    for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        yield CodeTest(_content(f"{field}.input[{number}]", given), _content(f"{field}.output[{number}]", wanted))


_READERS: Final = {
    "tests": _pairs,
    "official_tests": _pairs,
    "public_tests": _columns,
    "private_tests": _columns,
    "generated_tests": _columns,
    "input_output": _columns,
    "public_test_cases": _pairs,
}

#: Metadata fields that may hold tests.
TEST_FIELDS: Final = tuple(_READERS)


def _content(where: str, value: Any) -> Content:
    """Parse an input or output: a text, a list of lines (in parts of APPS), or an object with a link."""
    if isinstance(value, Mapping) and value.keys() == {LINK}:
        return _link(where, value[LINK])
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "\n".join(value)
    if not isinstance(value, str):
        raise TestsMalformed(f"{where} must be a text, got {_shown(value)}")
    return value.encode("utf-8", "surrogatepass")


def _link(where: str, value: Any) -> Link:
    try:
        return Link.parsed(str(value))
    except ValueError as error:
        raise TestsMalformed(f"{where}: {error}") from None


def _seconds(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        seconds, nanos = value.get("seconds", 0), value.get("nanos", 0)
        if isinstance(seconds, int | float) and isinstance(nanos, int | float):
            value = seconds + nanos / 1e9
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 600:
        raise TestsMalformed(f"time_limit must be seconds, above 0 and up to 600, got {_shown(value)}")
    return float(value)


def _memory(metadata: Mapping[str, Any]) -> int | None:
    for field, unit in (("memory_limit_bytes", 1), ("memory_limit", 1 << 20)):
        value = metadata.get(field)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 << 20 <= value * unit <= 1 << 36:
            raise TestsMalformed(f"{field} must be from 1 MB to 64 GB, got {_shown(value)}")
        return int(value * unit)
    return None


def _checker(metadata: Mapping[str, Any]) -> Checker | CustomChecker | None:
    value = metadata.get("checker")
    if value is None and isinstance(generated := metadata.get("generated_checker"), str):
        # Problems of open-r1/codeforces have their checker in this field.
        return CustomChecker(language="python", source=generated, protocol=Protocol.PRINTED)
    if value is None:
        return None
    if isinstance(value, str) and value in set(Checker):
        return Checker(value)
    if not isinstance(value, Mapping) or not isinstance(value.get("source", value.get(PROGRAM)), str):
        raise TestsMalformed(
            f"checker must be one of {', '.join(Checker)}, or an object with language, source and protocol, got "
            f"{_shown(value)}"
        )
    language, protocol, files = value.get("language", "cpp"), value.get("protocol", "testlib"), value.get("files") or {}
    if toolchains.named(str(language)) is None:
        raise TestsMalformed(f"checker.language must be one of {', '.join(toolchains.LANGUAGES)}, got {language!r:.40}")
    if protocol not in set(Protocol):
        raise TestsMalformed(f"checker.protocol must be one of {', '.join(Protocol)}, got {_shown(protocol)}")
    if not isinstance(files, Mapping) or not all(
        isinstance(text, str) and FILE_NAME.fullmatch(name) for name, text in files.items()
    ):
        raise TestsMalformed(f"checker.files must be texts by the names of files, got {_shown(files)}")
    return CustomChecker(
        language=str(language),
        source=value.get("source", ""),
        protocol=Protocol(protocol),
        files=tuple(files.items()),
        program=_link("checker.program", value[PROGRAM]) if PROGRAM in value else None,
    )


def _shown(value: Any) -> str:
    return f"{type(value).__name__} {value!r:.80}"
