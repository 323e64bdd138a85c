"""`PythonTool`: runs the code of a model's call in the sandbox, one run per call, and returns what it prints."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final, final

from pipelinerl.verifiers.oubliette.rules import CodeRules
from pipelinerl.verifiers.oubliette.runner import CodeRunner, Program
from pipelinerl.verifiers.oubliette.runs import Limits, ProgramResult, SandboxLost, SandboxMissing
from pipelinerl.verifiers.oubliette.sandbox import default_slots
from pipelinerl.verifiers.oubliette.verifier import open_runner

#: Maximum number of characters of a result that the model reads; of longer results, it reads the beginning and the end.
_MOST_SHOWN: Final = 4000
_OUTPUT_BYTES: Final = 64 << 10
_SILENT: Final = "(the program printed nothing)"


@final
class PythonTool:
    """The tool `python`. Each call is a separate run; nothing is kept between calls. The caller must close the tool."""

    name = "python"
    description = (
        "Run a Python program and return what it prints. Programs have no network and share nothing with earlier ones."
    )
    argument = "code"

    def __init__(self, rules: CodeRules, *, workers: int | None = None) -> None:
        self._at_once = workers or default_slots()
        self._rules = rules
        self._limits = Limits(
            cpu_s=rules.time_limit_s,
            wall_s=2 * rules.time_limit_s + 1,
            memory_bytes=rules.memory_bytes,
            output_bytes=_OUTPUT_BYTES,
        )
        self._runner: CodeRunner | None = None
        self._opening = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> None:
        """Open and probe the sandbox. If a service cannot be reached yet, the first call tries again.

        Raises:
            SandboxMissing: the sandbox is not available here; the message names the cause.
        """
        with contextlib.suppress(SandboxLost):
            await self._opened()

    async def call(self, text: str) -> tuple[str, bool]:
        """Run a program and return what the model reads, and whether the program failed.

        Raises:
            SandboxMissing, SandboxLost: the sandbox failed, which says nothing about the program.
        """
        runner = await self._opened()
        executed = await runner.run(Program("python", text.encode("utf-8", "replace")), b"", self._limits)
        return _shown(executed.result), not executed.result.succeeded

    async def close(self) -> None:
        """Close every guest."""
        self._is_closed = True
        async with self._opening:
            runner, self._runner = self._runner, None
        if runner is not None:
            await runner.close()

    async def _opened(self) -> CodeRunner:
        async with self._opening:
            if self._is_closed:
                raise SandboxLost("the tool is closed")
            if self._runner is None:
                try:
                    self._runner = await open_runner(self._rules, at_once=self._at_once)
                except SandboxMissing as error:
                    raise SandboxMissing(f"the python tool needs a sandbox: {error}") from None
            return self._runner


def _shown(result: ProgramResult) -> str:
    """Return the output; if the program failed, also its errors and how it ended."""
    parts = [result.stdout.decode("utf-8", "replace").rstrip()]
    if not result.succeeded:
        parts += [result.stderr.decode("utf-8", "replace").rstrip(), f"[{result.describe()}]"]
    text = "\n".join(part for part in parts if part) or _SILENT
    left_out = len(text) - _MOST_SHOWN
    if left_out <= 0:
        return text
    half = _MOST_SHOWN // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
