"""`CodeRunner`: compiles, runs and checks programs; `LocalRunner` does so in this machine's sandbox.

The RLAX paper has two operations (§6.1): compiling a source, and running a program on an input. Checking an output is a
third. Inputs and outputs are bytes, or links to stored bytes; a service keeps the outputs and passes on their links. A
program's guest never contains the expected answer, since a checker is a separate run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Final, Protocol

from pipelinerl.plugins.oubliette import toolchains
from pipelinerl.plugins.oubliette.checkers import Checker, CheckerFailed, CustomChecker, same
from pipelinerl.plugins.oubliette.repository import (
    Content,
    ContentMissing,
    PersistentRepository,
    TransientRepository,
    size_of,
)
from pipelinerl.plugins.oubliette.runs import Ending, Limits, ProgramResult, Run, SandboxLost
from pipelinerl.plugins.oubliette.sandbox import Sandbox
from pipelinerl.plugins.oubliette.toolchains import COMPILING

#: Size in bytes from which contents are compared, read and hashed on a thread instead of the event loop.
_LARGE: Final = 16 << 10
#: Number of compiled checkers that are cached.
_REMEMBERED: Final = 256


@dataclass(frozen=True, slots=True)
class Program:
    """A program: its source, or the result of compiling, which took `compile_s` seconds of elapsed time."""

    language: str
    content: Content
    compile_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Executed:
    """A finished run and its output, of which `result.stdout` may hold only the beginning."""

    result: ProgramResult
    output: Content


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """Request to judge a program's `output` by a checker, which also gets the program's `input` and right `answer`."""

    checker: Checker | CustomChecker
    tolerance: float
    input: Content
    output: Content
    answer: Content


class CodeRunner(Protocol):
    """Compiles, runs and checks programs. Raises `SandboxLost`, `SandboxMissing` or `ContentMissing` on failure."""

    @property
    def tier(self) -> str:
        """Name of the sandbox's tier, as shown in verdicts."""
        ...

    @property
    def at_once(self) -> int:
        """Number of programs that run concurrently."""
        ...

    async def compile(self, language: str, source: str, *, wall_s: float) -> Program | ProgramResult:
        """Compile a source within `wall_s`; if that fails, return the failed run. Raises `ToolchainMissing`."""
        ...

    async def run(self, program: Program, stdin: Content, limits: Limits) -> Executed:
        """Run a program on an input."""
        ...

    async def check(self, check: Check) -> float:
        """Return the share of the points, 0 to 1, that the output earns. Raises `CheckerFailed`."""
        ...

    async def read(self, content: Content) -> bytes:
        """Return the bytes of `content`, which may be a link."""
        ...

    async def close(self) -> None:
        """Stop everything that the runner has started, or close its connections."""
        ...


class LocalRunner:
    """Runner in this machine's sandbox; closing the runner closes the sandbox."""

    def __init__(
        self, sandbox: Sandbox, *, tier: str, at_once: int, repository: PersistentRepository | None = None,
        outputs: TransientRepository | None = None,
    ) -> None:  # fmt: skip
        """Create the runner; `repository` resolves links and stores compiled checkers.

        `outputs` stores the outputs of runs, which are then returned as links; without it, they are returned as bytes.
        """
        self.tier: Final = tier
        self.at_once: Final = at_once
        self._sandbox = sandbox
        self._repository = repository
        self._outputs = outputs
        self._checkers: OrderedDict[str, asyncio.Task[bytes]] = OrderedDict()

    async def compile(self, language: str, source: str, *, wall_s: float) -> Program | ProgramResult:
        """Compile a source if its language needs compiling. Nothing is cached, since a program is judged only once."""
        run = toolchains.find(language).compiling(source, replace(COMPILING, wall_s=min(wall_s, COMPILING.wall_s)))
        if run is None:
            return Program(language, source.encode("utf-8", "replace"))
        result = await self._ran(run)
        return Program(language, result.stdout, result.wall_s) if result.succeeded else result

    async def run(self, program: Program, stdin: Content, limits: Limits) -> Executed:
        content, read = await self.read(program.content), await self.read(stdin)
        result = await self._ran(toolchains.find(program.language).running(content, read, limits))
        if self._outputs is None:
            return Executed(result, result.stdout)
        put = self._outputs.put
        large = len(result.stdout) >= _LARGE
        return Executed(result, await asyncio.to_thread(put, result.stdout) if large else put(result.stdout))

    async def check(self, check: Check) -> float:
        """Compare output and answer in this process, or run the problem's own checker in a guest."""
        output, answer = await self.read(check.output), await self.read(check.answer)
        checker = check.checker
        if isinstance(checker, CustomChecker):
            return await self._custom_share(checker, await self.read(check.input), output, answer)
        given = (output, answer, checker, check.tolerance)
        return float(same(*given) if len(output) < _LARGE else await asyncio.to_thread(same, *given))

    async def _custom_share(self, checker: CustomChecker, given: bytes, output: bytes, answer: bytes) -> float:
        """Return the checker's share of points; 0 if it fails on the output but accepts the reference answer.

        Without this rule, a program could have its output masked by crashing the checker.
        """
        program = await self.checker(checker)
        try:
            return checker.share(await self._ran(checker.checking(program, given, output, answer)))
        except CheckerFailed:
            with contextlib.suppress(CheckerFailed):
                if checker.share(await self._ran(checker.checking(program, given, answer, answer))) == 1.0:
                    return 0.0
            raise

    async def checker(self, checker: CustomChecker) -> bytes:
        """Return a checker's compiled program, cached. Raises `CheckerFailed` if it does not compile."""
        if checker.program is not None:
            return await self.read(checker.program)
        key = checker.key
        task = self._checkers.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._checkers[key] = asyncio.create_task(self._compiled_checker(checker, key))
            while len(self._checkers) > _REMEMBERED:
                self._checkers.popitem(last=False)
        self._checkers.move_to_end(key)
        return await asyncio.shield(task)

    async def close(self) -> None:
        for task in self._checkers.values():
            task.cancel()
        await asyncio.gather(*self._checkers.values(), return_exceptions=True)
        await asyncio.to_thread(self._sandbox.close)

    async def _compiled_checker(self, checker: CustomChecker, key: str) -> bytes:
        run = checker.compiling()
        if run is None:
            return checker.source.encode()
        kept = None if self._repository is None else self._repository.compiled(key)
        if kept is not None:
            return await self.read(kept)
        result = await self._ran(run)
        if not result.succeeded:
            raise CheckerFailed(f"the problem's checker does not compile: {result.describe()}")
        if self._repository is not None:
            await asyncio.to_thread(self._repository.keep_compiled, key, result.stdout)
        return result.stdout

    async def read(self, content: Content) -> bytes:
        if isinstance(content, bytes):
            return content
        for place in (self._outputs, self._repository):
            if place is not None and content in place:
                return place.get(content) if size_of(content) < _LARGE else await asyncio.to_thread(place.get, content)
        if self._repository is None:
            raise ContentMissing(f"{content} cannot be resolved: set oubliette.repository to its folder")
        raise ContentMissing(f"{content} is not in the repository: upload it")

    async def _ran(self, run: Run) -> ProgramResult:
        result = await asyncio.wrap_future(self._sandbox.submit(run))
        if result.ending is Ending.STARVED:
            raise SandboxLost(f"a program {result.describe()}")
        return result
