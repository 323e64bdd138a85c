"""`Oubliette`: judges the program in an answer by running it on a problem's tests, in a sandbox.

The program is the last fenced block of the answer; it is compiled once, and run on the tests in their order, some at
once. It is correct if every test is. Tests end at the first failure, or go on where the reward is the share that is
passed. Expected answers are compared here, or in the checker's box, and never are in the program's.

What the program does wrong (no code, no compilation, crashes, its limits, other output) is `wrong`. What says nothing
of it is masked: a box that was lost twice, a processor that it was not given, tests that cannot be read, a checker that
fails, are `verifier_error`s; tests that take longer together than the verifier may are a `timeout`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
from collections import OrderedDict
from dataclasses import replace
from typing import Final, final

from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.oubliette import probe, toolchains
from pipelinerl.verifiers.oubliette.checkers import CheckerFailed, CustomChecker, same
from pipelinerl.verifiers.oubliette.code_problem import CodeProblem, CodeTest, TestsMalformed, last_block
from pipelinerl.verifiers.oubliette.rules import CodeRules, Scoring
from pipelinerl.verifiers.oubliette.runs import Ending, Limits, ProgramResult, Run, SandboxLost, SandboxMissing
from pipelinerl.verifiers.oubliette.sandbox import Sandbox, default_slots
from pipelinerl.verifiers.oubliette.toolchains import COMPILING, Toolchain, ToolchainMissing
from pipelinerl.verifiers.verifier import failed, graded, shown, timed_out, wrong

#: Compiled checkers that are kept.
_REMEMBERED: Final = 256
#: A program may write so much more than the answer.
_SPARE_OUTPUT: Final = 64 << 10
#: What is larger is compared beside the event loop.
_LARGE: Final = 16 << 10


@final
class Oubliette:
    """Verifier for problems with tests. To be closed; the sandbox is opened, and tried, at its start or the first
    answer."""

    def __init__(self, rules: CodeRules | None = None, *, deadline_s: float = 60.0, workers: int | None = None) -> None:
        self._rules = rules or CodeRules()
        self._deadline_s = deadline_s
        self._at_once = workers or default_slots()
        self._sandbox: Sandbox | None = None
        self._missing = ""
        self._opening = asyncio.Lock()
        self._checkers: OrderedDict[bytes, asyncio.Task[bytes]] = OrderedDict()

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge the program in an answer; the verdict's reason names the tier."""
        try:
            sandbox = await self._opened()
            judged = _Judged(sandbox, self, CodeProblem.of(problem), self._rules, self._deadline_s, self._at_once)
            verdict = await judged.verdict(completion_text)
        except (SandboxMissing, SandboxLost, TestsMalformed, ToolchainMissing, CheckerFailed) as error:
            return failed(str(error))
        except TimeoutError:
            return timed_out(self._deadline_s)
        return Verdict(
            outcome=verdict.outcome,
            reward=verdict.reward,
            reason=shown(f"{verdict.reason} [{self._rules.tier} sandbox]"),
        )

    async def start(self) -> None:
        """Open and try the sandbox, which the first answer would wait for; where there is none, that answer says so."""
        with contextlib.suppress(SandboxMissing):
            await self._opened()

    async def close(self) -> None:
        """End every box."""
        async with self._opening:
            self._missing = self._missing or "the verifier is closed"
            sandbox, self._sandbox = self._sandbox, None
        for task in self._checkers.values():
            task.cancel()
        if sandbox is not None:
            await asyncio.to_thread(sandbox.close)

    async def compiled(self, checker: CustomChecker, sandbox: Sandbox) -> bytes:
        """A checker's program, compiled at most once for all that ask.

        Raises:
            CheckerFailed: it does not compile.
        """
        key = hashlib.blake2b(repr((checker.language.name, checker.source, checker.files)).encode()).digest()
        task = self._checkers.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._checkers[key] = asyncio.create_task(_compiled_checker(checker, sandbox))
            while len(self._checkers) > _REMEMBERED:
                self._checkers.popitem(last=False)
        self._checkers.move_to_end(key)
        return await asyncio.shield(task)

    async def _opened(self) -> Sandbox:
        async with self._opening:
            if self._missing:
                raise SandboxMissing(self._missing)
            if self._sandbox is None:
                try:
                    self._sandbox = await asyncio.to_thread(probe.opened, self._rules.tier, at_once=self._at_once)
                except SandboxMissing as error:
                    self._missing = str(error)
                    raise
            return self._sandbox


async def _compiled_checker(checker: CustomChecker, sandbox: Sandbox) -> bytes:
    run = checker.compiling()
    if run is None:
        return checker.source.encode()
    result = await _ran(sandbox, run)
    if not result.succeeded:
        raise CheckerFailed(f"the problem's checker does not compile: {result.describe()}")
    return result.stdout


async def _ran(sandbox: Sandbox, run: Run) -> ProgramResult:
    result = await asyncio.wrap_future(sandbox.submit(run))
    if result.ending is Ending.STARVED:
        raise SandboxLost(f"a program {result.describe()}")
    return result


@final
class _Judged:
    """One answer's program, while it is judged."""

    def __init__(
        self,
        sandbox: Sandbox,
        verifier: Oubliette,
        problem: CodeProblem,
        rules: CodeRules,
        deadline_s: float,
        at_once: int,
    ) -> None:
        self._sandbox = sandbox
        self._verifier = verifier
        self._problem = problem
        self._rules = rules
        self._at_once = at_once
        self._left_s = deadline_s

    async def verdict(self, text: str) -> Verdict:
        """Without the tier. Raises `TimeoutError` when the verifier's time is over before the tests are."""
        block = last_block(text)
        if block is None:
            return wrong("the answer has no closed fenced block of code")
        language = self._language(block[0])
        if isinstance(language, Verdict):
            return language
        program = await self._program(language, block[1])
        if isinstance(program, Verdict):
            return program
        shares: list[float] = []
        reason = ""
        tests = self._problem.tests
        for begin in range(0, len(tests), self._at_once):
            found = await asyncio.gather(
                *(self._tested(language, program, test) for test in tests[begin : begin + self._at_once])
            )
            for number, (share, told) in enumerate(found, begin + 1):
                shares.append(share)
                reason = reason or (told and f"test {number} of {len(tests)}: {told}")
            if reason and self._rules.scoring is Scoring.ALL:
                return wrong(reason)
        return _scored(shares, reason, self._rules.scoring)

    def _language(self, name: str) -> Toolchain | Verdict:
        """The block's language. Raises `ToolchainMissing` where it is to be judged and is not installed."""
        named = toolchains.named(name or self._rules.language)
        if named is None or named.name not in self._rules.languages:
            return wrong(f"the code is in {name!r}; judged are {', '.join(self._rules.languages)}")
        return toolchains.find(named.name)

    async def _program(self, language: Toolchain, source: str) -> bytes | Verdict:
        compiling = language.compiling(source, COMPILING)
        if compiling is None:
            return source.encode("utf-8", "replace")
        result = await self._run(compiling)
        return result.stdout if result.succeeded else wrong(f"the code does not compile: {result.describe()}")

    async def _tested(self, language: Toolchain, program: bytes, test: CodeTest) -> tuple[float, str]:
        """(share, why not all) of one test."""
        time_limit_s = self._problem.time_limit_s or self._rules.time_limit_s
        checker = self._problem.checker or self._rules.checker
        custom = isinstance(checker, CustomChecker)
        limits = Limits(
            cpu_s=time_limit_s,
            wall_s=2 * time_limit_s + 1,
            memory_bytes=self._problem.memory_bytes or self._rules.memory_bytes,
            output_bytes=Limits().output_bytes if custom else 2 * len(test.answer) + _SPARE_OUTPUT,
        )
        result = await self._run(language.running(program, test.input, limits))
        if not result.succeeded:
            return 0.0, result.describe()
        if isinstance(checker, CustomChecker):
            compiled = await self._verifier.compiled(checker, self._sandbox)
            checked = await _ran(self._sandbox, checker.checking(compiled, test.input, result.stdout, test.answer))
            share = checker.share(checked)
            return share, "" if share == 1.0 else "the problem's checker refuses the output"
        given = (result.stdout, test.answer, checker, self._rules.tolerance)
        right = same(*given) if len(result.stdout) < _LARGE else await asyncio.to_thread(same, *given)
        return (1.0, "") if right else (0.0, f"wrote {result.stdout[:60]!r}")

    async def _run(self, run: Run) -> ProgramResult:
        """Within what is left of the verifier's time, which passes while programs run and not while they wait."""
        left_s = self._left_s
        if left_s <= 0:
            raise TimeoutError
        if short := left_s < run.limits.wall_s:
            run = replace(run, limits=replace(run.limits, wall_s=left_s))
        result = await _ran(self._sandbox, run)
        self._left_s -= result.wall_s / self._at_once
        if short and result.ending is Ending.DEADLINE:
            raise TimeoutError
        return result


def _scored(shares: list[float], reason: str, scoring: Scoring) -> Verdict:
    passed = sum(share == 1.0 for share in shares)
    right = passed == len(shares)
    reward = sum(shares) / len(shares) if scoring is Scoring.SHARE else float(right)
    return Verdict(
        outcome=Outcome.CORRECT if right else graded(reward, math.inf),
        reward=reward,
        reason=f"{passed} of {len(shares)} tests passed{'; ' + reason if reason else ''}",
    )
