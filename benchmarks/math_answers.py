"""Measure the share of math answers that are judged right, by `math_answer` and by math-verify alone.

Both arms judge the same pairs of `math_answers.toml`, answer by answer in worker processes with the same deadline: ours
with `math_answer`, the other with `parse` and `verify` of math-verify as its README shows. An answer that an arm does
not judge in time counts as judged wrong. Targets: at least 99 % right, and no wrong answer rewarded.
"""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.measure import Row, report
from pipelinerl.plugins.math_answer.verifier import MathAnswer
from pipelinerl.types import Message, Problem
from pipelinerl.verifiers.worker_pool import WorkerLost, WorkerPool

LEAST_RIGHT: Final = 0.99
_DEADLINE_S: Final = 5.0
#: The part of the table that was written before the verifier.
_HELD_OUT: Final = "held_out"


class Pair(NamedTuple):
    """A ground truth, a model's answer, whether it is right, and the part of the table."""

    gold: str
    answer: str
    right: bool
    part: str


def pairs() -> list[Pair]:
    """Read the table."""
    parts = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return [
        Pair(gold.replace("⏎", "\n"), answer.replace("⏎", "\n"), right, part)
        for part, rows in parts.items()
        for gold, answer, right in rows
    ]


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    table = pairs()[:: 10 if quick else 1]
    ours, theirs = asyncio.run(_rewarded(table))
    rows, record = [Row("pairs", len(table)), Row("… held out", len(_of(table, _HELD_OUT)))], {}
    for name, rewarded in (("math_answer", ours), ("math-verify", theirs)):
        for part, chosen in (("all", range(len(table))), ("held out", _of(table, _HELD_OUT))):
            right = sum(rewarded[place] is table[place].right for place in chosen) / max(1, len(chosen))
            wrongly = sum(rewarded[place] and not table[place].right for place in chosen)
            target = name == "math_answer" and part == "all"
            rows += [
                Row(f"{name}, {part}: judged right", f"{right:.1%}", ">= 99 %" if target else "",
                    right >= LEAST_RIGHT if target else None),
                Row(f"{name}, {part}: wrong answers rewarded", wrongly, "0" if target else "",
                    wrongly == 0 if target else None),
            ]  # fmt: skip
            record[f"{name}, {part}"] = {"pairs": len(chosen), "right": right, "wrongly_rewarded": wrongly}
    report("math_answers", rows, record, quick=quick)


def _of(table: list[Pair], part: str) -> list[int]:
    return [place for place, pair in enumerate(table) if pair.part == part]


async def _rewarded(table: list[Pair]) -> tuple[list[bool], list[bool]]:
    """Judge all pairs with both arms; return for each whether the answer is rewarded."""
    ours = MathAnswer(deadline_s=_DEADLINE_S)
    theirs = WorkerPool(f"{Path(__file__).with_name('math_verify_arm.py')}:open_math_verify", deadline_s=_DEADLINE_S)
    turns = asyncio.Semaphore(4)

    async def judge(pair: Pair) -> tuple[bool, bool]:
        problem = Problem(problem_id="d:1", domain="d", messages=(Message("user", "?"),), ground_truth=pair.gold)
        async with turns:
            verdict = await ours.verify(problem, pair.answer)
            try:
                other = bool(await theirs.ask([pair.gold, pair.answer]))
            except (TimeoutError, WorkerLost):
                other = False
            return verdict.reward == 1.0, other

    try:
        await theirs.ask(["1", "$1$"])  # raises an error if the library cannot be started
        judged = await asyncio.gather(*(judge(pair) for pair in table))
    finally:
        await ours.close()
        await theirs.close()
    return [first for first, _ in judged], [second for _, second in judged]
