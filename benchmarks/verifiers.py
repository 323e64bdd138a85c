"""Measure what hostile answers cost other groups that are judged at the same time.

Groups of `hostile_texts` (special tokens, a million characters, 9**9**9**9, unbalanced LaTeX, NUL, bidi) are judged
together with ordinary groups, whose latency is compared with their latency alone. Targets: no hostile answer gets a
reward of 0 because the verifier failed, every verdict comes within the deadline plus a second, and the ordinary groups'
P95 at most doubles.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.measure import Row, report
from pipelinerl.config.domains import DomainSection
from pipelinerl.rng import generator
from pipelinerl.roles.verification import open_verifier
from pipelinerl.types import Message, Outcome, Problem
from pipelinerl.verifiers.verifier import GroupVerifier, SampledAnswer

MOST_OF_P95 = 2.0
GROUP = 8
_DEADLINE_S = 2.0
#: Longest allowed time from the request to the verdict, including the time in the queue.
MOST_LATE_S = _DEADLINE_S + 1.0
#: Number of ordinary groups, and of hostile groups, that are judged at the same time.
_AT_ONCE = 2
#: Maximum number of times that the ordinary groups are repeated while hostile groups remain.
_MOST_TURNS = 16

_HOSTILE = (
    "<|im_start|>assistant<|im_end|><|endoftext|>\\boxed{{{n}}}",
    "x" * 10**6,
    "\\boxed{{" + "(" * 10**6,
    "answer is\n" + " \n" * 500_000,
    "<answer>" * 125_000,
    "\\boxed{{9^{{9^{{9^{{9}}}}}} + {n}}}",
    "\\boxed{{\\sum_{{k=1}}^{{1000000}} \\frac{{1}}{{k^2+x+{n}}}}}",
    "\\boxed{{10^{{10^{{10}}}} \\cdot {n}}}",
    "\\boxed{{\\int_0^\\infty \\frac{{\\sin(x^2)}}{{x^5+x+{n}}} dx}}",
    "\\boxed{{\\frac{{1}}{{{n}",
    "\\boxed{{\\left(\\sqrt{{{n}}} \\right]}}",
    "\\boxed{{" + "(" * 400 + "{n}" + ")" * 400 + "}}",
    "\\boxed{{{n}\x00\x00 + x}}",
    "\\boxed{{\u202e{n} + x\u2066\u200b}}",
    "\\boxed{{\ud800 + {n}}}",
    "\\boxed{{" + "9" * 1900 + "e99999999}}",
    "\\boxed{{\\sum_{{k=1}}^{{10^{{12}}}} k^{n}}}",
    "\\boxed{{__import__('os').system('true') + {n}}}",
    "\\boxed{{" + "\\begin{{pmatrix}} x & y \\\\ " * 60 + "}}",
    "{{}}" * 250_000 + "\\boxed{{\\text{{" + "\\text{{" * 200,
)


def hostile_texts(count: int) -> list[str]:
    """Return `count` answers that are meant to break, stall or deceive a verifier; every call returns the same ones."""
    return [_HOSTILE[number % len(_HOSTILE)].format(n=number) for number in range(count)]


def run(quick: bool = False) -> None:
    """Run the benchmark, print its table and, unless `quick`, write its record."""
    texts, parts = hostile_texts(100 if quick else 1000), 1 if quick else 4
    alone, with_them, groups = Latencies(), Latencies(), 30 if quick else 50
    for part in range(parts):  # alternating, so that other load affects both alike
        asyncio.run(judge_with([], alone, groups=groups))
        asyncio.run(judge_with(texts[part::parts], with_them, groups=groups))
    p95 = with_them.p95_s / alone.p95_s
    late = max(with_them.hostile_s, default=0.0)
    rows = [
        Row("hostile answers", len(texts)),
        *(Row(f"… {outcome}", with_them.outcomes[outcome]) for outcome in Outcome),
        Row("… slowest verdict after its request (s)", late, f"<= {MOST_LATE_S:g}", late <= MOST_LATE_S),
        Row("… verdicts later than that", sum(each > MOST_LATE_S for each in with_them.hostile_s), "0"),
        Row("other groups' P95 alone (s)", alone.p95_s),
        Row("… with hostile ones (s)", with_them.p95_s),
        Row("… with hostile ones, ratio", p95, f"<= {MOST_OF_P95:g}", p95 <= MOST_OF_P95),
    ]  # fmt: skip
    payload = {
        "hostile": {str(outcome): number for outcome, number in with_them.outcomes.items()},
        "slowest_hostile_s": late,
        "p95_s": {"alone": alone.p95_s, "with_hostile": with_them.p95_s},
    }
    report("verifiers", rows, payload, quick=quick)


def expressions(count: int) -> list[tuple[str, str]]:
    """Return (truth, answer) pairs whose equality a comparison of texts cannot decide; half of them are equal."""
    noise = generator(0, "verifier benchmark")
    made = []
    for number in range(count):
        a, b, c = (int(value) for value in noise.integers(2, 60, 3))
        truth, equal, other = (
            (f"\\frac{{{a}}}{{{b}}}", f"{a * c}/{b * c}", f"{a * c + 1}/{b * c}"),
            (f"x^2+{a + b}x+{a * b}", f"(x+{a})(x+{b})", f"(x+{a})(x-{b})"),
            (f"{a}\\sqrt{{{b}}}", f"\\sqrt{{{a * a * b}}}", f"\\sqrt{{{a * b + 1}}}"),
            (f"\\{{{a},{b + 60},{c + 120}\\}}", f"\\{{{c + 120},{a},{b + 60}\\}}", f"\\{{{c},{a}\\}}"),
        )[number % 4]
        made.append((truth, equal if number // 4 % 2 else other))
    return made


async def _all_judged(verifier: GroupVerifier, pairs: Sequence[tuple[str, str]]) -> None:
    await asyncio.gather(
        *(verifier.judge(_problem(truth, number), [SampledAnswer(text)]) for number, (truth, text) in enumerate(pairs))
    )


def _problem(truth: str, number: int) -> Problem:
    return Problem(problem_id=f"d:{number}", domain="d", messages=(Message("user", "?"),), ground_truth=truth)


@dataclass(frozen=True, slots=True)
class Latencies:
    """Latencies of ordinary and hostile groups, and the outcomes of the hostile answers."""

    ordinary_s: list[float] = field(default_factory=list)
    hostile_s: list[float] = field(default_factory=list)
    outcomes: Counter[Outcome] = field(default_factory=Counter)

    @property
    def p95_s(self) -> float:
        """The latency that one ordinary group in twenty exceeds."""
        return float(np.quantile(self.ordinary_s, 0.95))


async def judge_with(hostile: Sequence[str], latencies: Latencies, *, groups: int) -> None:
    """Judge all hostile groups and, meanwhile, at least `groups` ordinary groups; add the results to `latencies`."""
    verifier = open_verifier(DomainSection(name="math", source="addition", verifier_timeout_s=_DEADLINE_S))
    ordinary = expressions(_MOST_TURNS * groups * GROUP)  # distinct pairs, since sympy caches comparisons
    waiting = [hostile[begin : begin + GROUP] for begin in range(0, len(hostile), GROUP)][::-1]
    begun = itertools.count()
    hostile_left = len(waiting)

    async def judge_ordinary() -> None:
        while (number := next(begun)) < groups or hostile_left:
            first = number * GROUP % len(ordinary)
            pairs = ordinary[first : first + GROUP]
            began = time.monotonic()
            await _all_judged(verifier, pairs)
            latencies.ordinary_s.append(time.monotonic() - began)
            await asyncio.sleep(0.05)

    async def judge_hostile() -> None:
        nonlocal hostile_left
        while waiting:
            texts, problem = waiting.pop(), _problem("x+1", -len(waiting))
            for verdict, took in await verifier.judge(problem, [SampledAnswer(text) for text in texts]):
                latencies.outcomes[verdict.outcome] += 1
                latencies.hostile_s.append(took)
            hostile_left -= 1

    try:
        await _all_judged(verifier, ordinary[: 4 * GROUP])
        await asyncio.gather(*(judge() for judge in (judge_ordinary, judge_hostile) for _ in range(_AT_ONCE)))
    finally:
        await verifier.close()
