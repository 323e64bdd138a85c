"""`CodeProblem`: the tests in a problem's metadata; and extraction of code from answers.

Any of these fields of the metadata may hold tests, and all that do are used; docs/use/verification.md names the data
sets that have them:

    tests, test_cases, official_tests, public_tests, private_tests, generated_tests, input_output, public_test_cases,
    private_test_cases, verification_info

The value's form decides how it is read, whatever the field: a list of pairs [{"input", "output"}, …], two lists
{"inputs": […], "outputs": […]} (or "input", "output"), or an object that holds one of these as "test_cases" or "tests".
Each may also be JSON in a text, or packed as LiveCodeBench packs its private tests.

If it has no tests, the ground truth may hold tests as JSON. An input or output may be a link into a repository:
{"link": "oub:…"}. `time_limit` is in seconds (or code_contests' {"seconds", "nanos"}), `memory_limit` in MB
(`memory_limit_bytes` in bytes). `checker` names a built-in rule or holds a program; open-r1/codeforces has a
`generated_checker`, in Python.

Tests that call a function are rejected: programs read standard input and write standard output.
"""

from __future__ import annotations

import base64
import binascii
import json
import pickletools
import re
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.checkers import FILE_NAME, Checker, CustomChecker, Protocol
from pipelinerl.plugins.oubliette.repository import LINK, Content, Link
from pipelinerl.types import Problem

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
        tests: list[CodeTest] = []
        for field in TEST_FIELDS:
            value = metadata.get(field)
            if field == "generated_tests" and isinstance(value, int):
                # In open-r1/codeforces, this field is only the number of tests, which are stored elsewhere.
                continue
            if value:
                tests += _tests(field, value)
        if not tests and problem.ground_truth.lstrip()[:1] in ("[", "{"):
            tests += _tests("the answer", problem.ground_truth)
        if not tests:
            raise TestsMalformed(
                f"{problem.problem_id} has no tests: its metadata must have one of {', '.join(TEST_FIELDS)}, it has "
                f"{', '.join(metadata) or 'nothing'}; name the field in metadata_fields"
            )
        return cls(
            tests=tuple(tests),
            time_limit_s=_seconds(metadata.get("time_limit")),
            memory_bytes=_memory(metadata),
            checker=_checker(metadata),
        )


#: An opening or closing fence, after list markers and quotes; they count as its indentation.
_FENCE: Final = re.compile(
    r"(?P<indent>[ \t]*(?:>[ \t]?)*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<info>[^\n`]*)"
)
_LANGUAGE: Final = re.compile(r"[{.\s]*([A-Za-z][A-Za-z0-9+#_.-]*)")
#: Words before a block without a language that make it an illustration, if they end the line before it.
_ILLUSTRATES: Final = re.compile(
    r"\b(?:outputs?|inputs?|results?|prints?|examples?|usage|stdin|stdout|run|runs|tests?|explanation)\b[^.\n]{0,40}$",
    re.IGNORECASE,
)
_LONGEST_CODE: Final = 1 << 20


class CodeBlock(NamedTuple):
    """A closed fenced block: its language ("" if it names none), its code, and the line of text before it."""

    language: str
    code: str
    before: str = ""


def program_block(text: str, languages: Collection[str]) -> CodeBlock | None:
    """Return the block that is the program of an answer, None if the answer has no closed block.

    It is the last block in an accepted language; else the last that names no language, preferably one that is not
    announced as an output or an example; else the last block. Takes linear time.
    """
    blocks = list(_blocks(text))
    named = [block for block in blocks if (one := toolchains.named(block.language)) and one.name in languages]
    unnamed = [block for block in blocks if not block.language]
    programs = [block for block in unnamed if not _ILLUSTRATES.search(block.before)]
    chosen = named or programs or unnamed or blocks
    return chosen[-1] if chosen and len(chosen[-1].code) <= _LONGEST_CODE else None


def _blocks(text: str) -> Iterator[CodeBlock]:
    """Yield the closed fenced blocks of a text, without the indentation of their fences."""
    fence, opened, before, lines = "", "", "", list[str]()
    indent, quotes = 0, 0
    for line in text.splitlines(keepends=True):
        match = _FENCE.fullmatch(line.rstrip("\r\n"))
        if not fence:
            if match is not None:
                fence, opened, lines = match["fence"], match["info"], []
                indent, quotes = len(match["indent"].expandtabs(4)), match["indent"].count(">")
            elif line.strip():
                before = line.strip().strip("*_: ")
        elif match is not None and match["fence"].startswith(fence) and not match["info"].strip():
            language = _LANGUAGE.match(opened)
            yield CodeBlock(language[1] if language else "", "".join(lines), before)
            fence = before = ""
        else:
            lines.append(_dedented(line, indent, quotes))


def _dedented(line: str, indent: int, quotes: int) -> str:
    """Remove the marks of quotes, and at most the indentation of the fence, as CommonMark does."""
    for _ in range(quotes):
        line = re.sub(r"^[ \t]*>[ \t]?", "", line)
    if quotes or not indent:
        return line
    blank = len(line) - len(line.lstrip(" \t"))
    if "\t" in line[:blank]:
        line = line[:blank].expandtabs(4) + line[blank:]
        blank = len(line) - len(line.lstrip(" "))
    return line[min(blank, indent) :]


# --- layouts ----------------------------------------------------------------------------------------------------------

#: Metadata fields that may hold tests.
TEST_FIELDS: Final = (
    "tests", "test_cases", "official_tests", "public_tests", "private_tests", "generated_tests", "input_output",
    "public_test_cases", "private_test_cases", "verification_info",
)  # fmt: skip
#: Type names of tests that read standard input, in public data sets.
_STDIN: Final = (None, "stdin", "stdin_stdout", "stdio", "")
#: Largest number of characters of unpacked tests.
_MOST_UNPACKED: Final = 1 << 30


def _parsed(field: str, value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value if value.lstrip()[:1] in ("[", "{", '"') else _unpacked(value))
        return json.loads(parsed) if isinstance(parsed, str) else parsed
    except ValueError as error:
        raise TestsMalformed(f"{field} must be tests, or tests as JSON: {error}") from None


def _unpacked(value: str) -> str:
    """Unpack a text that LiveCodeBench packed: base64 of a zlib stream of a pickled text, which is only scanned.

    Raises ValueError, also for a pickle of anything but one text.
    """
    try:
        stream = zlib.decompressobj()
        packed = stream.decompress(base64.b64decode(value, validate=True), _MOST_UNPACKED)
        if not stream.eof:
            raise ValueError
        operations = [(code.name, argument) for code, argument, _ in pickletools.genops(packed)]
    except (zlib.error, binascii.Error, ValueError):
        raise ValueError(f"got {value!r:.40}") from None
    texts = [argument for name, argument in operations if "UNICODE" in name]
    others = {name for name, _ in operations if "UNICODE" not in name}
    if len(texts) != 1 or not others <= {"PROTO", "FRAME", "MEMOIZE", "BINPUT", "LONG_BINPUT", "STOP"}:
        raise ValueError("the packed tests are no text")
    return str(texts[0])


def _tests(field: str, value: Any) -> Iterator[CodeTest]:
    value = _parsed(field, value)
    if not isinstance(value, Mapping):
        if not isinstance(value, list | tuple):
            raise TestsMalformed(f"{field} must be a list of objects with input and output, got {_shown(value)}")
        for number, each in enumerate(value):
            where = f"{field}[{number}]"
            if not isinstance(each, Mapping) or not {"input", "output"} <= each.keys():
                raise TestsMalformed(f"{where} must have input and output, got {_shown(each)}")
            if each.get("testtype", each.get("type")) not in _STDIN or each.get("fn_name"):
                raise TestsMalformed(f"{where} calls a function; only standard input and output can be tested")
            yield CodeTest(_content(f"{where}.input", each["input"]), _content(f"{where}.output", each["output"]))
        return
    for inner in ("test_cases", "tests"):
        if value.get(inner):
            yield from _tests(f"{field}.{inner}", value[inner])
            return
    if value.get("fn_name"):
        raise TestsMalformed(
            f"{field} calls the function {value['fn_name']}; only standard input and output can be tested"
        )
    inputs, outputs = (value.get(name, value.get(f"{name}s")) for name in ("input", "output"))
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple) or len(inputs) != len(outputs):
        raise TestsMalformed(f"{field} must have as many inputs as outputs, in two lists, got {_shown(value)}")
    for number, (given, wanted) in enumerate(zip(inputs, outputs, strict=True)):
        yield CodeTest(_content(f"{field}.input[{number}]", given), _content(f"{field}.output[{number}]", wanted))


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
