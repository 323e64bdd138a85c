"""`pipelinerl sandbox upload`: move the tests of a data set into a repository and replace them by links.

A row's tests may have any layout that `code_problem.py` reads. They are stored in a folder or by a sandbox service,
which also compiles the row's checker; the row then has links in `tests` and `checker`. Inputs and answers that are
about as short as a link stay in the row.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
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
#: Number of rows processed concurrently.
_ROWS_AT_ONCE: Final = 16
_MOST_REASONS: Final = 5


class Upload:
    """Stores the tests of rows, each content once.

    Attributes:
        rows: number of rows that were written. left_out: number of the others; `reasons` are those of the first.
        contents: number of inputs and answers that were sent, with `num_bytes` in all.
    """

    def __init__(self, store: RepositoryFolder | RemoteRunner) -> None:
        self._store = store
        self._there: set[Link] = set()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self.rows = self.left_out = self.contents = self.num_bytes = 0
        self.reasons: list[str] = []

    async def linked(self, rows: DataRows, number: int, *, answer_field: str) -> bytes:
        """Store a row's tests; return its JSON line with links to them, or b"" for a row that is left out.

        `answer_field` names the field with the tests, for a row without any of the known fields.
        """
        try:
            linked = await self._linked(rows.row(number), answer_field)
            line = msgspec.json.encode({name: plain(value, name) for name, value in linked.items()}) + b"\n"
        except (TestsMalformed, CheckerFailed, ToolchainMissing, RecipeError) as error:
            self.left_out += 1
            self.reasons += [f"{rows.place(number)}: {error}"][: _MOST_REASONS - len(self.reasons)]
            return b""
        self.rows += 1
        return line

    async def _linked(self, row: Row, answer_field: str) -> dict[str, Any]:
        answer = row.get(answer_field)
        truth = answer if isinstance(answer, str) else ""
        metadata = dict(row) if any(row.get(field) for field in TEST_FIELDS) else {**row, "tests": answer}
        problem = CodeProblem.of(
            Problem(problem_id="the row", domain="", messages=(), ground_truth=truth, metadata=metadata)
        )
        contents = [content for test in problem.tests for content in (test.input, test.answer)]
        long = {Link.of(content): content for content in contents if isinstance(content, bytes) and _is_long(content)}
        if new := long.keys() - self._there:
            await asyncio.gather(*(self._send(long[link]) for link in await self._store.missing(list(new))))
            self._there |= new
        left = {key: value for key, value in row.items() if key not in (*TEST_FIELDS, answer_field)}
        left["tests"] = [{"input": _shown(test.input), "output": _shown(test.answer)} for test in problem.tests]
        checker = problem.checker
        if isinstance(checker, CustomChecker):
            link = checker.program if checker.program is not None else await self._store.compile_checker(checker)
            left.pop("generated_checker", None)
            left["checker"] = {"language": checker.language, "protocol": checker.protocol.value, PROGRAM: str(link)}
        return left

    async def _send(self, data: bytes) -> None:
        async with self._room:
            await self._store.upload(data)
        self.contents += 1
        self.num_bytes += len(data)


def _is_long(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return True
    return len(content) > _SHORT


def _shown(content: Content) -> Any:
    if isinstance(content, Link):
        return {LINK: str(content)}
    return {LINK: str(Link.of(content))} if _is_long(content) else content.decode()


async def upload(files: Sequence[Path], out: Path, rules: OublietteSection, *, answer_field: str) -> Upload:
    """Upload the tests of all rows in `files` to the store set in `rules`; write rows with links instead to `out`.

    Raises `UserError` if a file cannot be read, or the store is unavailable.
    """
    for file in files:
        if not file.is_file() or suffix_of(file) not in SUFFIXES:
            raise UserError(f"{file} must be a file of rows, of one of {', '.join(SUFFIXES)}")
    read = [
        ArrowRows.read(file, None) if suffix_of(file) in (".parquet", ".arrow") else JsonRows.read(file)
        for file in files
    ]
    store: RepositoryFolder | RemoteRunner
    if rules.url:
        runner = await open_runner(rules, at_once=1)
        assert isinstance(runner, RemoteRunner), "the rules name a service"
        store = runner
    else:
        store = RepositoryFolder(PersistentRepository(Path(rules.repository)), rules)
    done = Upload(store)
    try:
        with out.open("wb") as target:
            for rows in read:
                for begin in range(0, len(rows), _ROWS_AT_ONCE):
                    numbers = range(begin, min(begin + _ROWS_AT_ONCE, len(rows)))
                    lines = (done.linked(rows, number, answer_field=answer_field) for number in numbers)
                    target.writelines(await asyncio.gather(*lines))
    finally:
        await store.close()
    return done


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
