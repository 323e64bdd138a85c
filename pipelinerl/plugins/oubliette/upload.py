"""`pipelinerl sandbox upload`: move the tests of a data set into a repository and replace them by links.

A row's tests may have any layout that `code_problem.py` reads. They are stored in a folder or by a sandbox service,
which also compiles the row's checker; the row then has links in `tests` and `checker`. Inputs and answers that are
about as short as a link stay in the row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from pipelinerl.data.files.layouts import SUFFIXES
from pipelinerl.data.files.rows import ArrowRows, DataRows, JsonRows, Row, suffix_of
from pipelinerl.data.files.values import plain
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.plugins.oubliette import probe
from pipelinerl.plugins.oubliette.checkers import CheckerFailed, CustomChecker
from pipelinerl.plugins.oubliette.code_problem import PROGRAM, TEST_FIELDS, CodeProblem, TestsMalformed
from pipelinerl.plugins.oubliette.remote.client import RemoteRunner
from pipelinerl.plugins.oubliette.repository import LINK, Content, Link, PersistentRepository
from pipelinerl.plugins.oubliette.runner import LocalRunner
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.toolchains import ToolchainMissing
from pipelinerl.plugins.oubliette.verifier import open_runner
from pipelinerl.types import Problem

#: Text of at most this many bytes, about the length of a link, stays in its data row; longer text becomes a link.
_SHORT: Final = 96
#: Number of contents (inputs or answers) that are uploaded concurrently.
_AT_ONCE: Final = 8


class RowLinker:
    """Stores the test inputs and answers of rows, without duplicates; `contents` and `num_bytes` count those sent."""

    def __init__(self, store: RepositoryFolder | RemoteRunner) -> None:
        self._store = store
        self._there: set[Link] = set()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.contents = 0
        self.num_bytes = 0

    async def row(self, row: Mapping[str, Any], *, answer_field: str) -> dict[str, Any]:
        """Store the row's tests, and return the row with links to them in the field `tests`.

        `answer_field` names the field with the tests, for a row without any of the known fields.

        Raises:
            TestsMalformed: the row has no tests that can be run.
            CheckerFailed: its checker does not compile.
        """
        answer = row.get(answer_field)
        truth = answer if isinstance(answer, str) else ""
        metadata = dict(row) if any(row.get(field) for field in TEST_FIELDS) else {**row, "tests": answer}
        problem = CodeProblem.of(
            Problem(problem_id="the row", domain="", messages=(), ground_truth=truth, metadata=metadata)
        )
        contents = [content for test in problem.tests for content in (test.input, test.answer)]
        await self._upload(contents)
        left = {key: value for key, value in row.items() if key not in (*TEST_FIELDS, answer_field)}
        left["tests"] = [{"input": _shown(test.input), "output": _shown(test.answer)} for test in problem.tests]
        checker = problem.checker
        if isinstance(checker, CustomChecker):
            link = checker.program if checker.program is not None else await self._store.compile_checker(checker)
            left.pop("generated_checker", None)
            left["checker"] = {"language": checker.language, "protocol": checker.protocol.value, PROGRAM: str(link)}
        return left

    async def _upload(self, contents: list[Content]) -> None:
        named = {Link.of(content): content for content in contents if isinstance(content, bytes) and _is_long(content)}
        new = [link for link in named if link not in self._there]
        if not new:
            return
        missing = await self._store.missing(new)
        await asyncio.gather(*(self._sent(named[link]) for link in missing))
        self._there.update(new)

    async def _sent(self, data: bytes) -> None:
        async with self._room:
            await self._store.upload(data)
        self.contents += 1
        self.num_bytes += len(data)


def _is_long(content: bytes) -> bool:
    return len(content) > _SHORT or not _is_text(content)


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _shown(content: Content) -> Any:
    if isinstance(content, Link):
        return {LINK: str(content)}
    return {LINK: str(Link.of(content))} if _is_long(content) else content.decode()


# --- a whole data set -------------------------------------------------------------------------------------------------

#: Number of rows processed concurrently.
_ROWS_AT_ONCE: Final = 16
_MOST_REASONS: Final = 5


@dataclass(frozen=True, slots=True)
class UploadReport:
    """Counts of rows written and left out, reasons for the first rows left out, and the inputs and answers sent."""

    rows: int
    left_out: int
    reasons: tuple[str, ...]
    contents: int
    num_bytes: int


async def upload(files: Sequence[Path], out: Path, rules: OublietteSection, *, answer_field: str) -> UploadReport:
    """Upload the tests of all rows in `files` to the store set in `rules`; write rows with links instead to `out`.

    Raises:
        UserError: a file cannot be read, or the store is unavailable.
    """
    rows = [_rows_of(file) for file in files]
    reasons: list[str] = []
    written = left_out = 0
    async with AsyncExitStack() as stack:
        uploader = RowLinker(await _store(rules, stack))
        with out.open("wb") as target:
            for part in rows:
                for begin in range(0, len(part), _ROWS_AT_ONCE):
                    numbers = range(begin, min(begin + _ROWS_AT_ONCE, len(part)))
                    done = await asyncio.gather(*(_tried(uploader, part, number, answer_field) for number in numbers))
                    for row in done:
                        if isinstance(row, str):
                            left_out += 1
                            reasons += [row][: _MOST_REASONS - len(reasons)]
                        else:
                            written += 1
                            target.write(msgspec.json.encode(row) + b"\n")
    return UploadReport(written, left_out, tuple(reasons), uploader.contents, uploader.num_bytes)


async def _tried(uploader: RowLinker, rows: DataRows, number: int, answer_field: str) -> Row | str:
    row = rows.row(number)
    try:
        linked = await uploader.row(row, answer_field=answer_field)
        return {name: plain(value, name) for name, value in linked.items()}
    except (TestsMalformed, CheckerFailed, ToolchainMissing, RecipeError) as error:
        return f"{rows.place(number)}: {error}"


def _rows_of(file: Path) -> DataRows:
    if not file.is_file() or suffix_of(file) not in SUFFIXES:
        raise UserError(f"{file} must be a file of rows, of one of {', '.join(SUFFIXES)}")
    return ArrowRows.read(file, None) if suffix_of(file) in (".parquet", ".arrow") else JsonRows.read(file)


async def _store(rules: OublietteSection, stack: AsyncExitStack) -> RepositoryFolder | RemoteRunner:
    if not rules.url:
        folder = RepositoryFolder(PersistentRepository(Path(rules.repository)), rules)
        stack.push_async_callback(folder.close)
        return folder
    runner = await open_runner(rules, at_once=1)
    stack.push_async_callback(runner.close)
    assert isinstance(runner, RemoteRunner), "the rules name a service"
    return runner


class RepositoryFolder:
    """A local store of tests' inputs, answers and checkers; opens the sandbox only to compile the first checker."""

    def __init__(self, repository: PersistentRepository, rules: OublietteSection) -> None:
        self._repository = repository
        self._rules = rules
        self._runner: LocalRunner | None = None
        self._opening = asyncio.Lock()

    async def missing(self, links: list[Link]) -> set[Link]:
        """Return those of `links` whose data is not stored yet."""
        return {link for link in links if link not in self._repository}

    async def upload(self, data: bytes) -> Link:
        return await asyncio.to_thread(self._repository.put, data)

    async def compile_checker(self, checker: CustomChecker) -> Link:
        """Compile a checker, store it and return its link; raise `CheckerFailed` if it does not compile."""
        async with self._opening:
            if self._runner is None:
                sandbox = await asyncio.to_thread(probe.opened, self._rules.tier, at_once=1)
                self._runner = LocalRunner(sandbox, tier=str(self._rules.tier), at_once=1, repository=self._repository)
        return self._repository.put(await self._runner.checker(checker))

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.close()
