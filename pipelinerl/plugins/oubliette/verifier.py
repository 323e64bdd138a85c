"""`Oubliette`: judges the program in an answer by running it on a problem's tests, in a sandbox.

`program_block` chooses the program in the answer. It is compiled once and run on the tests in order, several at once.
It is correct if it passes all tests. Testing stops at the first failure, unless the reward is the share of tests
passed. Expected answers are never in the program's guest. `PythonTool` runs programs for a model in the same sandbox.

Faults of the program (no code, no compilation, crashes, limits, other output) are `wrong`. Failures that say nothing
about the program are masked as `verifier_error`: a guest lost twice, lack of a processor, invalid tests, or a checker
that also fails on the reference answer. If the tests together exceed the deadline, the verdict is a `timeout`. If a
service restarts and thereby loses stored programs or outputs, the answers that need them are judged from the start.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from dataclasses import dataclass, replace
from typing import Final

from pipelinerl.errors import RecipeError
from pipelinerl.plugins.oubliette import probe, toolchains
from pipelinerl.plugins.oubliette.checkers import CheckerFailed, CustomChecker, Scoring
from pipelinerl.plugins.oubliette.code_problem import CodeProblem, CodeTest, TestsMalformed, program_block
from pipelinerl.plugins.oubliette.remote.client import RemoteRunner
from pipelinerl.plugins.oubliette.repository import Content, ContentMissing, PersistentRepository, size_of
from pipelinerl.plugins.oubliette.runner import Check, CodeRunner, Executed, LocalRunner, Program
from pipelinerl.plugins.oubliette.runs import Ending, Limits, SandboxLost, SandboxMissing
from pipelinerl.plugins.oubliette.sandbox import isolation_of
from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.toolchains import COMPILING, ToolchainMissing
from pipelinerl.system.files import from_home
from pipelinerl.system.secret_variables import read_secret
from pipelinerl.system.service_client import Grace
from pipelinerl.types import Outcome, Problem, Verdict
from pipelinerl.verifiers.verifier import (
    GroupVerifier,
    PerAnswerVerifier,
    VerifierContext,
    failed,
    graded,
    shown,
    timed_out,
    wrong,
)
from pipelinerl.verifiers.worker_pool import num_cores

#: A program's output may have twice as many bytes as the expected answer, plus this number.
_SPARE_OUTPUT: Final = 64 << 10
#: Number of attempts at judging an answer whose content a service lost by restarting.
_TRIES: Final = 8
#: Seconds for which an unreachable service is retried.
_GRACE_S: Final = 60.0


def open_verifier(section: OublietteSection, context: VerifierContext) -> GroupVerifier:
    """Return the verifier of a domain; it enforces the deadline itself."""
    return PerAnswerVerifier(Oubliette(section, deadline_s=context.deadline_s, workers=context.workers))


async def tier_of_opened(section: OublietteSection) -> str:
    """Open the sandbox and return its tier. A local sandbox is tested with attacks, a remote one only for availability.

    Raises `SandboxMissing` or `SandboxLost` if there is none.
    """
    try:
        await (await open_runner(section, at_once=1)).close()
    except (SandboxMissing, SandboxLost) as error:
        raise SandboxMissing(f"oubliette.tier: {error}") from None
    return f"remote {section.tier}" if section.url else section.tier.value


def check_sandbox(section: OublietteSection) -> None:
    """Raise `SandboxMissing` if programs are to run on this machine, and it lacks the tier."""
    if not section.url:
        isolation_of(section.tier, 0)


def refuse_unreadable(problem: Problem) -> None:
    """Raise `RecipeError` for a problem with invalid tests or other invalid metadata."""
    try:
        CodeProblem.of(problem)
    except TestsMalformed as error:
        raise RecipeError(str(error)) from None


class Oubliette:
    """Verifier for problems with tests. `start` or the first answer opens the sandbox."""

    def __init__(self, rules: OublietteSection, *, deadline_s: float = 60.0, workers: int | None = None) -> None:
        self._rules = rules
        self._deadline_s = deadline_s
        self._sandbox = _LazyRunner(rules, workers)

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Judge the program in an answer; the verdict's reason names the sandbox's tier."""
        try:
            runner = await self._sandbox.opened(_GRACE_S)
            verdict = await self._judged(runner, CodeProblem.of(problem), completion_text)
        except (SandboxMissing, SandboxLost, TestsMalformed, ToolchainMissing, CheckerFailed, ContentMissing) as error:
            return failed(str(error))
        except TimeoutError:
            return timed_out(self._deadline_s)
        return replace(verdict, reason=shown(f"{verdict.reason} [{runner.tier} sandbox]"))

    async def start(self) -> None:
        """Open and probe the sandbox; a failure is reported when the first answer is judged."""
        with contextlib.suppress(SandboxMissing, SandboxLost):
            await self._sandbox.opened(0.0)

    async def close(self) -> None:
        await self._sandbox.close()

    async def _judged(self, runner: CodeRunner, problem: CodeProblem, text: str) -> Verdict:
        for _ in range(_TRIES - 1):
            with contextlib.suppress(ContentMissing):
                return await _Judged(runner, problem, self._rules, self._deadline_s).verdict(text)
        return await _Judged(runner, problem, self._rules, self._deadline_s).verdict(text)


class _LazyRunner:
    """A runner that the first use opens."""

    def __init__(self, rules: OublietteSection, workers: int | None) -> None:
        self._rules = rules
        self._at_once = workers or num_cores()
        self._runner: CodeRunner | None = None
        self._missing = ""
        self._unreachable: tuple[float, str] | None = None
        self._opening = asyncio.Lock()

    async def close(self) -> None:
        self._missing = self._missing or "the sandbox is closed"
        async with self._opening:
            runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()

    async def opened(self, grace_s: float) -> CodeRunner:
        """Return the runner; an unreachable service is retried for `grace_s`. If that fails, waiting calls fail too."""
        began = time.monotonic()
        async with self._opening:
            if self._runner is not None:
                return self._runner
            if self._missing:
                raise SandboxMissing(self._missing)
            if self._unreachable is not None and self._unreachable[0] >= began:
                raise SandboxLost(self._unreachable[1])
            try:
                self._runner = await self._reached(Grace(grace_s, until=began + grace_s))
            except SandboxMissing as error:
                self._missing = str(error)
                raise
            except SandboxLost as error:
                self._unreachable = time.monotonic(), str(error)
                raise
            return self._runner

    async def _reached(self, grace: Grace) -> CodeRunner:
        while not self._missing:
            try:
                return await open_runner(self._rules, at_once=self._at_once)
            except SandboxLost as error:
                await grace.pause(error)
        raise SandboxMissing(self._missing)


async def open_runner(rules: OublietteSection, *, at_once: int) -> CodeRunner:
    """Open the service that the rules name, or this machine's sandbox; the caller must close the runner.

    Raises `SandboxMissing` if the tier is not available, and `SandboxLost` if the service cannot be reached now.
    """
    if not rules.url:
        repository = PersistentRepository(from_home(rules.repository)) if rules.repository else None
        sandbox = await asyncio.to_thread(probe.opened, rules.tier, at_once=at_once)
        return LocalRunner(sandbox, tier=str(rules.tier), at_once=at_once, repository=repository)
    token = read_secret(rules.key_variable) if rules.key_variable else None
    if rules.key_variable and not token:
        raise SandboxMissing(f"oubliette.key_variable names ${rules.key_variable}, which is not set here")
    return await RemoteRunner.open(rules.url, token=token, tier=rules.tier)


@dataclass(slots=True)
class _Judged:
    """The judging of one answer; `_left_s` is what remains of the verifier's deadline."""

    _runner: CodeRunner
    _problem: CodeProblem
    _rules: OublietteSection
    _left_s: float

    async def verdict(self, text: str) -> Verdict:
        """Compile and test the program in `text`. Raises `TimeoutError` if the verifier's time runs out."""
        block = program_block(text, self._rules.accepted_languages)
        if block is None:
            return wrong("the answer has no closed fenced block of code")
        named = toolchains.named(block.language or self._rules.language)
        if named is None or named.name not in self._rules.accepted_languages:
            return wrong(f"the code is in {block.language!r}; accepted are {', '.join(self._rules.accepted_languages)}")
        program = await self._runner.compile(named.name, block.code, wall_s=self._left_s)
        if not isinstance(program, Program):
            if program.ending is Ending.DEADLINE and self._left_s < COMPILING.wall_s:
                raise TimeoutError
            return wrong(f"the code does not compile: {program.describe()}")
        self._left_s -= program.compile_s / self._runner.at_once
        shares: list[float] = []
        reason = ""
        tests = self._problem.tests
        at_once = self._runner.at_once
        for begin in range(0, len(tests), at_once):
            results = await asyncio.gather(*(self._tested(program, test) for test in tests[begin : begin + at_once]))
            for number, (share, failure) in enumerate(results, begin + 1):
                shares.append(share)
                reason = reason or (failure and f"test {number} of {len(tests)}: {failure}")
            if reason and self._rules.scoring is Scoring.ALL:
                return wrong(reason)
        passed = sum(share == 1.0 for share in shares)
        right = passed == len(shares)
        reward = sum(shares) / len(shares) if self._rules.scoring is Scoring.SHARE else float(right)
        return Verdict(
            outcome=Outcome.CORRECT if right else graded(reward, math.inf),
            reward=reward,
            reason=f"{passed} of {len(shares)} tests passed{'; ' + reason if reason else ''}",
        )

    async def _tested(self, program: Program, test: CodeTest) -> tuple[float, str]:
        """Run one test; return the share of its points, and, if the share is below 1, the reason."""
        time_limit_s = self._problem.time_limit_s or self._rules.time_limit_s
        checker = self._problem.checker or self._rules.checker
        custom = isinstance(checker, CustomChecker)
        limits = Limits(
            cpu_s=time_limit_s,
            wall_s=2 * time_limit_s + 1,
            memory_bytes=self._problem.memory_bytes or self._rules.memory_bytes,
            output_bytes=Limits().output_bytes if custom else 2 * size_of(test.answer) + _SPARE_OUTPUT,
        )
        executed = await self._run(program, test.input, limits)
        if not executed.result.succeeded:
            return 0.0, executed.result.describe()
        share = await self._runner.check(
            Check(
                checker=checker,
                tolerance=self._rules.tolerance,
                input=test.input,
                output=executed.output,
                answer=test.answer,
            )
        )
        if custom:
            return share, "" if share == 1.0 else "the problem's checker rejects the output"
        return share, "" if share == 1.0 else f"wrote {executed.result.stdout[:60]!r}"

    async def _run(self, program: Program, stdin: Content, limits: Limits) -> Executed:
        """Run the program on one test, and subtract the run's time (not its wait in the queue) from `_left_s`.

        The run's time is divided by the number of concurrent runs. Raises `TimeoutError` if no time is left.
        """
        left_s = self._left_s
        if left_s <= 0:
            raise TimeoutError
        if short := left_s < limits.wall_s:
            limits = replace(limits, wall_s=left_s)
        executed = await self._runner.run(program, stdin, limits)
        self._left_s -= executed.result.wall_s / self._runner.at_once
        if short and executed.result.ending is Ending.DEADLINE:
            raise TimeoutError
        return executed


#: Maximum number of characters of a result for the model; longer results are cut in the middle.
_MOST_SHOWN: Final = 4000
_OUTPUT_BYTES: Final = 64 << 10
_SILENT: Final = "(the program printed nothing)"


class PythonTool:
    """The tool `python`, each call of which is a separate run. The caller must close the tool."""

    name = "python"
    description = (
        "Run a Python program and return what it prints. Programs have no network and share nothing with earlier ones."
    )
    argument = "code"

    def __init__(self, rules: OublietteSection, workers: int | None = None) -> None:
        self._sandbox = _LazyRunner(rules, workers)
        self._limits = Limits(
            cpu_s=rules.time_limit_s,
            wall_s=2 * rules.time_limit_s + 1,
            memory_bytes=rules.memory_bytes,
            output_bytes=_OUTPUT_BYTES,
        )

    async def start(self) -> None:
        """Open and probe the sandbox, unless a service cannot be reached yet. Raises `SandboxMissing`."""
        with contextlib.suppress(SandboxLost):
            await self._opened()

    async def call(self, text: str) -> tuple[str, bool]:
        """Run `text`; return the text for the model, and whether it failed. Raises `SandboxMissing`, `SandboxLost`."""
        runner = await self._opened()
        result = (await runner.run(Program("python", text.encode("utf-8", "replace")), b"", self._limits)).result
        parts = [result.stdout.decode("utf-8", "replace").rstrip()]
        if not result.succeeded:
            parts += [result.stderr.decode("utf-8", "replace").rstrip(), f"[{result.describe()}]"]
        shown, half = "\n".join(part for part in parts if part) or _SILENT, _MOST_SHOWN // 2
        if (left_out := len(shown) - _MOST_SHOWN) > 0:
            shown = f"{shown[:half]}\n[{left_out} characters left out]\n{shown[-half:]}"
        return shown, not result.succeeded

    async def close(self) -> None:
        await self._sandbox.close()

    async def _opened(self) -> CodeRunner:
        try:
            return await self._sandbox.opened(0.0)
        except SandboxMissing as error:
            raise SandboxMissing(f"the python tool needs a sandbox: {error}") from None
