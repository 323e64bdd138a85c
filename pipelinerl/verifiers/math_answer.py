"""Verifier for the final answer of a mathematical problem: equal as text after normalisation, or equal as mathematics.

The mathematical comparison runs `math-verify` in worker processes (`open_comparison`). Its parser can run forever while
holding the interpreter lock (9**9**9**9), and its timeouts need the main thread, so only killing a process enforces a
deadline. A verdict's `answer` is the normalised answer.

An answer may crash the parser, or keep it busy until the deadline (10^9!). Such an answer is wrong if the parser can
compare the ground truth with itself in time: masking it would let a model escape problems that it cannot solve. If the
comparison was late only because it waited for a processor, the verdict is a `timeout`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
import resource
from collections.abc import Callable
from typing import Final, final

from pipelinerl.errors import RecipeError
from pipelinerl.types import Problem, Verdict
from pipelinerl.verifiers.verifier import correct, failed, last_tagged, timed_out, wrong
from pipelinerl.verifiers.worker_pool import Overran, WorkerLost, WorkerPool

# All quantifiers are possessive: the search never backtracks, so it takes one pass over any text.
_STATED: Final = re.compile(r"answer(?: is)?+\s*+[:=]?+\s*+([^\n]++)", re.IGNORECASE)
_PLAIN_NUMBER: Final = re.compile(r"[-+]?\d+(?:\.\d+)?")
#: Longest answer given to the parser, after normalisation; before normalisation it may have twice that length.
_MAX_ANSWER_CHARS: Final = 2000
#: If a comparison misses the deadline, its answer is wrong if the comparison used this share of it in processor time.
_SHARE_SPENT: Final = 0.5
#: Number of characters of an answer that a verdict shows.
_SHOWN: Final = 200


@final
class MathAnswer:
    """Verifier for problems whose ground truth is a number or an expression, in LaTeX or plain text."""

    def __init__(self, *, deadline_s: float = 5.0, workers: int | None = None) -> None:
        self._deadline_s = deadline_s
        self._installed = importlib.util.find_spec("math_verify") is not None
        self._pool = WorkerPool(
            "pipelinerl.verifiers.math_answer:open_comparison", workers=workers, deadline_s=deadline_s
        )

    async def verify(self, problem: Problem, completion_text: str) -> Verdict:
        """Compare the final answer in `completion_text` with the ground truth."""
        verdict = self.at_once(problem, completion_text)
        if verdict is not None:
            return verdict
        gold, given = normalise(problem.ground_truth), normalise(final_answer(completion_text))
        return await self._equivalent(gold, given, group=problem.problem_id)

    def at_once(self, problem: Problem, completion_text: str) -> Verdict | None:
        """Return the verdict of the text comparison, or None if the answer needs the mathematical comparison."""
        stated = final_answer(completion_text).strip()
        if len(stated) > 2 * _MAX_ANSWER_CHARS:
            return wrong(f"the answer has {len(stated)} characters", answer=stated[:_SHOWN])
        gold, given = normalise(problem.ground_truth), normalise(stated)
        answer = given[:_SHOWN]
        if given == gold:
            return correct(answer)
        if not given or len(given) > _MAX_ANSWER_CHARS:
            reason = "no answer" if not given else f"the answer has {len(given)} characters"
            return wrong(reason, answer=answer)
        if _PLAIN_NUMBER.fullmatch(given) and _PLAIN_NUMBER.fullmatch(gold):
            equal = float(given) == float(gold) and len(given) < 16
            return correct(answer) if equal else wrong(f"{answer} is not {gold}", answer=answer)
        if not self._installed:
            return wrong(f"{answer} is not {gold} as text (math-verify is not installed)", answer=answer)
        return None

    async def start(self) -> None:
        """Start the first worker, so that the first answer does not wait for the library's import."""
        if self._installed:
            await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

    async def _equivalent(self, gold: str, given: str, *, group: str) -> Verdict:
        try:
            equal = await self._pool.ask([gold, given], group=group)
        except Overran as overran:
            if _SHARE_SPENT * self._deadline_s <= overran.cpu_s < math.inf and await self._is_comparable(gold):
                return wrong(f"comparing the answer took more than {overran.cpu_s:.1f} s", answer=given[:_SHOWN])
            return timed_out(self._deadline_s)
        except WorkerLost as error:
            return failed(f"math-verify: {error}")
        if equal is None:
            return failed(f"math-verify failed on {given[:80]!r} against {gold[:80]!r}")
        # All answers equal to the ground truth are reported in its form.
        return correct(gold[:_SHOWN]) if equal else wrong(f"{given[:80]} is not {gold[:80]}", answer=given[:_SHOWN])

    async def _is_comparable(self, gold: str) -> bool:
        try:
            return bool(await self._pool.ask([gold, gold]))
        except (TimeoutError, WorkerLost):
            return False


def refuse_unreadable(problem: Problem) -> None:
    """Raise `RecipeError` for a ground truth that cannot be compared with any answer."""
    gold = normalise(problem.ground_truth)
    if not gold:
        raise RecipeError(
            f"the ground truth {problem.ground_truth!r:.80} is empty, but math_answer compares answers with it"
        )
    if len(gold) > 2 * _MAX_ANSWER_CHARS:
        raise RecipeError(
            f"the ground truth has {len(gold)} characters, and math_answer takes {2 * _MAX_ANSWER_CHARS} at most; give "
            "only the final answer"
        )


def final_answer(text: str) -> str:
    r"""Return the last `\boxed{…}`, else the last `<answer>…</answer>`, else the text after "answer", else `text`."""
    for answer in (_last_boxed(text), last_tagged(text)):
        if answer is not None:
            return answer
    stated = _STATED.findall(text)
    return str(stated[-1]) if stated else text


def normalise(answer: str) -> str:
    r"""Remove spaces, `$`, thousands separators, a full stop, leading zeros and `\text{}` from an answer."""
    text = answer.strip().strip("$").strip()
    text = re.sub(r"\\(?:text|mathrm)\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|!|;|:)|\s+", "", text).removesuffix(".")
    text = re.sub(r"(?<=\d),(?=\d{3}(?:\D|$))", "", text) if re.fullmatch(r"[-+]?[\d,]+(?:\.\d+)?", text) else text
    number = re.fullmatch(r"([-+]?)(\d+)((?:\.\d+)?)", text)
    if number is None:
        return text
    fraction = number[3].rstrip("0").rstrip(".")
    return f"{'-' if number[1] == '-' else ''}{number[2].lstrip('0') or '0'}{fraction}"


def _last_boxed(text: str) -> str | None:
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth = 1
    for brace in re.finditer(r"[{}]", text[begin : begin + 4 * _MAX_ANSWER_CHARS]):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : begin + brace.start()]
    return None


_MEMORY_BYTES: Final = 2 << 30
#: Expressions that warm up the caches of parser and simplifier: the first expression of each kind takes up to a quarter
#: of a second.
_EACH_KIND: Final = (
    ["x+1", "1+x"],
    [r"\frac{3}{4}", "6/8"],
    ["x^2+5x+6", "(x+2)(x+3)"],
    ["x^2+5x+6", "(x+2)(x-3)"],
    [r"4\sqrt{5}", r"\sqrt{80}"],
    [r"4\sqrt{5}", r"\sqrt{81}"],
    [r"\{1,2,3\}", r"\{3,1,2\}"],
    [r"\{1,2\}", r"\{2,3\}"],
    [r"[1,2)\cup(3,\infty)", "(3,4)"],
    ["(1,2)", "(2,1)"],
    ["x=3", "3"],
    [r"x\le 3", r"3\ge x"],
    [r"\sin(x)^2", r"1-\cos(x)^2"],
    [r"e^{2}\ln 3", r"2\pi"],
    [r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"],
    [r"50\%", "0.5"],
)


def open_comparison(_: str) -> Callable[[list[str]], bool | None]:
    """Return the function that a worker runs: `[gold, given]` → whether the two answers are equal.

    The result is None if the library fails on `gold` itself. If it fails only on `given`, the result is False;
    otherwise a model could learn to crash the library.
    """
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException

    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))

    failures = (
        ArithmeticError, AttributeError, LookupError, MemoryError, NotImplementedError, RecursionError, SyntaxError,
        TimeoutException, TypeError, ValueError,
    )  # fmt: skip

    def compared(gold: str, given: str) -> bool | None:
        try:
            first, second = (parse(f"${text}$", parsing_timeout=None, raise_on_error=True) for text in (gold, given))
            if not first:
                return None
            return bool(second) and bool(verify(first, second, timeout_seconds=None, raise_on_error=True))
        except failures:
            return None

    def equal(question: list[str]) -> bool | None:
        gold, given = question
        result = compared(gold, given)
        if result is None and given != gold and compared(gold, gold):
            return False
        return result

    for question in _EACH_KIND:
        equal(question)
    return equal
