"""Judges the final answer of a mathematical problem: equal as text after normalisation, or else equal as mathematics.

The first is quick and needs no library. The second is `math-verify` in a process of its own (`math_worker.py`): its
parser can run for ever and hold the interpreter lock meanwhile (9**9**9**9), and its timeouts need the main thread, so
a deadline that holds can only be kept by killing. Its pipe is written here: a pool that kills at a deadline too
(pebble's) hands each question on through two threads, and gives 0.7 times as many answers a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import re
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import AsyncExitStack
from typing import Final, final

from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import CORRECT, failed, timed_out, wrong

_ANSWER_TAGS: Final = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_SAID: Final = re.compile(r"(?:final answer|answer)(?: is)?\s*[:=]?\s*([^\n]+)", re.IGNORECASE)
_PLAIN_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d+)?")
#: Longer answers are not worth a parser's time.
_MAX_ANSWER_CHARS: Final = 2000
_STARTUP_S: Final = 60.0


@final
class MathAnswer:
    """Verifier for problems whose ground truth is a number or an expression, in LaTeX or plain text."""

    def __init__(self, *, deadline_s: float = 5.0) -> None:
        self._deadline_s = deadline_s
        self._installed = importlib.util.find_spec("math_verify") is not None
        self._worker: Process | None = None
        self._turn = asyncio.Lock()

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Compare the final answer in `completion_text` with the ground truth."""
        answer = final_answer(completion_text)
        gold, given = normalise(problem.ground_truth), normalise(answer)
        if given == gold:
            return CORRECT
        if not given or len(given) > _MAX_ANSWER_CHARS:
            return wrong("no answer" if not given else f"an answer of {len(given)} characters")
        if _PLAIN_NUMBER.fullmatch(given) and _PLAIN_NUMBER.fullmatch(gold):
            return CORRECT if float(given) == float(gold) and len(given) < 16 else wrong(f"{given} is not {gold}")
        if not self._installed:
            return wrong(f"{given} is not {gold} as text (math-verify is not installed)")
        return await self._equivalent(gold, given)

    async def close(self) -> None:
        """End the worker process, if there is one."""
        async with self._turn:
            await self._end_worker()

    async def _equivalent(self, gold: str, given: str) -> Verdict:
        async with self._turn:  # one question at a time; released by the answer, or by the deadline
            try:
                async with AsyncExitStack() as unanswered:
                    # Cancelled, too, between question and answer: the next would read the wrong one.
                    unanswered.push_async_callback(self._end_worker)
                    worker = await asyncio.wait_for(self._ready_worker(), _STARTUP_S)
                    answer = await asyncio.wait_for(_ask(worker, gold, given), self._deadline_s)
                    unanswered.pop_all()
            except TimeoutError:
                return timed_out(self._deadline_s)
            except (OSError, ValueError, KeyError) as error:
                return failed(f"the math-verify process ended or babbled: {type(error).__name__}: {error}")
        if answer is None:
            return failed(f"math-verify failed on {given[:80]!r} against {gold[:80]!r}")
        return CORRECT if answer else wrong(f"{given[:80]} is not {gold[:80]}")

    async def _ready_worker(self) -> Process:
        if self._worker is None or self._worker.returncode is not None:
            self._worker = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pipelinerl.verifiers.math_worker", stdin=PIPE, stdout=PIPE
            )
            assert self._worker.stdout is not None
            if not await self._worker.stdout.readline():  # its first line says that it has imported the library
                raise OSError("it did not start")
        return self._worker

    async def _end_worker(self) -> None:
        worker, self._worker = self._worker, None
        if worker is not None and worker.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                worker.kill()
            await asyncio.wait_for(worker.wait(), 5.0)


async def _ask(worker: Process, gold: str, given: str) -> bool | None:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write(json.dumps({"gold": gold, "given": given}).encode() + b"\n")
    await worker.stdin.drain()
    equal: bool | None = json.loads(await worker.stdout.readline())["equal"]
    return equal


def final_answer(text: str) -> str:
    """The last `\\boxed{…}`, else the last `<answer>…</answer>`, else what "answer is" says last, else all."""
    boxed = _last_boxed(text)
    if boxed is not None:
        return boxed
    for pattern in (_ANSWER_TAGS, _SAID):
        found = pattern.findall(text)
        if found:
            return str(found[-1])
    return text


def normalise(answer: str) -> str:
    """Without what carries no meaning: spaces, `$`, thousands separators, a full stop, leading zeros, `\\text{}`."""
    text = answer.strip().strip("$").strip()
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|!|;|:)|\s+", "", text).removesuffix(".")
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text) if re.fullmatch(r"[-+]?[\d,]+(?:\.\d+)?", text) else text
    number = re.fullmatch(r"([-+]?)0*(\d+)((?:\.\d+)?)", text)
    if number is None:
        return text
    fraction = number[3].rstrip("0").rstrip(".")
    return f"{'-' if number[1] == '-' else ''}{number[2]}{fraction}"


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth = 0
    for place in range(start + len("\\boxed"), len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start + len("\\boxed{") : place]
    return None
