"""Oubliette under load: verdicts on honest programs, and how long honest programs wait beside hostile ones.

    verdicts   10,000 answers of a dozen kinds, right and wrong, through the verifier, many at once: each verdict must
               be the one that is known before
    waits      honest pairs that come one after the other, at drawn times; then the same with one in ten hostile: loops,
               sleeps, forks, floods of memory, of output and of files. From an honest pair's coming to its result, of
               which the 95th percentile beside hostile ones must be at most twice the one alone

The hostile ones have a processor time of 0.5 s and 2 s on the clock; as many run at once as there are cores.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from benchmarks.measure import Row, paired, print_table, write_record
from pipelinerl.rng import generator
from pipelinerl.types import Message, Outcome, Problem
from pipelinerl.verifiers.oubliette import probe, toolchains
from pipelinerl.verifiers.oubliette.rules import CodeRules
from pipelinerl.verifiers.oubliette.runs import Limits, Run, Tier
from pipelinerl.verifiers.oubliette.sandbox import Sandbox
from pipelinerl.verifiers.oubliette.verifier import Oubliette

VERDICTS: Final = 10_000
MOST_TIMES: Final = 2.0
_AT_ONCE: Final = 64
#: Honest pairs of a round, and how many come in a second for each core.
_PAIRS: Final = 300
_PER_S: Final = 8.0
_HOSTILE_SHARE: Final = 0.1

#: Programs that read n and have to print n * n, and whether they do.
ANSWERS: Final = (
    ("print(int(input()) ** 2)", True),
    ("import sys\nn = int(sys.stdin.read())\nsys.stdout.write(f'{n * n}\\n')", True),
    ("from collections import Counter\nn = int(input())\nprint(Counter('a' * n)['a'] * n)", True),
    ("import math\nn = int(input())\nprint(math.prod([n, n]))", True),
    ("n = int(input())\nprint(sum(n for _ in range(n)))", True),
    ("def f(n, k):\n    return 0 if k == 0 else n + f(n, k - 1)\nn = int(input())\nprint(f(n, n))", True),
    ("import threading\nn = int(input())\nt = threading.Thread(target=lambda: print(n * n))\nt.start()", True),
    ("open('f', 'w').write(input())\nn = int(open('f').read())\nprint(n * n)", True),
    ("print(int(input()) ** 2 + 1)", False),
    ("print(int(input()) ** 2)\n1 / 0", False),
    ("print(int(input()) ** 2", False),
    ("import sys\nprint(int(input()) ** 2)\nsys.exit(1)", False),
)
HOSTILE: Final = (
    "while True: pass",
    "import time\ntime.sleep(3600)",
    "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "x = []\nwhile True: x.append(b'x' * (1 << 20))",
    "while True: print('x' * 1000)",
    "n = 0\nwhile True:\n    n += 1\n    open(f'f{n}', 'w').write('x' * 10000)",
)
_HONEST: Final = "n = int(input())\nprint(sum(range(n)))"
_HOSTILE_LIMITS: Final = Limits(cpu_s=0.5, wall_s=2.0, memory_bytes=128 << 20, output_bytes=1 << 20)


def run(quick: bool) -> None:
    """Measure, print the table and write the record."""
    cores = len(os.sched_getaffinity(0))
    count = 200 if quick else VERDICTS
    began = time.perf_counter()
    wrong, masked = asyncio.run(_verdicts(count))
    verdicts_s = time.perf_counter() - began
    sandbox = probe.opened(Tier.DEFAULT, at_once=cores)
    try:
        rounds = 2 if quick else 5
        pairs = 60 if quick else _PAIRS
        arms = {
            "alone": lambda: _p95_s(sandbox, pairs, cores, hostile=0.0),
            "beside": lambda: _p95_s(sandbox, pairs, cores, hostile=_HOSTILE_SHARE),
        }
        timings = paired(arms, rounds=rounds)
    finally:
        sandbox.close()
    ratio = timings.ratio("beside", "alone")
    rows = [
        Row(f"wrong verdicts of {count}", wrong, "0", wrong == 0),
        Row("… masked", masked),
        Row("… verdicts/s", count / verdicts_s),
        Row("P95 beside 10 % hostile ÷ alone", ratio, f"<= {MOST_TIMES:g}", ratio.median <= MOST_TIMES),
        *(Row(f"P95 {arm} (ms)", 1000 * timings.median(arm)) for arm in ("alone", "beside")),
    ]
    print_table("oubliette_load", rows)
    if not quick:
        write_record(
            "oubliette_load",
            {
                "verdicts": count,
                "wrong": wrong,
                "masked": masked,
                "verdicts_per_s": count / verdicts_s,
                "p95_ratio": ratio.as_dict(),
                **timings.as_dict(),
            },
        )


async def _verdicts(count: int) -> tuple[int, int]:
    """(wrong, masked) of so many."""
    draw = generator(0, "oubliette_load", count)
    verifier = Oubliette(CodeRules(time_limit_s=60.0), deadline_s=600.0)
    room = asyncio.Semaphore(_AT_ONCE)
    wrong = masked = 0

    async def one(number: int, kind: int, n: int) -> None:
        nonlocal wrong, masked
        code, right = ANSWERS[kind]
        test = {"input": f"{n}\n", "output": f"{n * n}\n"}
        problem = Problem(
            problem_id=f"p{number}",
            domain="squares",
            messages=(Message("user", "?"),),
            ground_truth="",
            metadata={"tests": [test]},
        )
        async with room:
            verdict = await verifier.verify(problem, f"```python\n{code}\n```")
        masked += not verdict.outcome.is_judgement
        wrong += verdict.outcome.is_judgement and (verdict.outcome is Outcome.CORRECT) != right

    kinds, numbers = draw.integers(0, len(ANSWERS), count), draw.integers(2, 900, count)
    try:
        await asyncio.gather(
            *(one(i, int(kind), int(n)) for i, (kind, n) in enumerate(zip(kinds, numbers, strict=True)))
        )
    finally:
        await verifier.close()
    return wrong, masked


def _p95_s(sandbox: Sandbox, pairs: int, cores: int, *, hostile: float) -> float:
    """The 95th percentile of honest pairs' seconds, from their coming to their results."""
    draw = generator(1, "oubliette_load", pairs)
    pauses = draw.exponential(1.0 / (_PER_S * cores), pairs)
    is_hostile = draw.random(pairs) < hostile
    language = toolchains.find("python")
    seconds: list[float] = []
    wanted: list[bytes] = []
    futures = []
    for number in range(pairs):
        time.sleep(float(pauses[number]))
        if is_hostile[number]:
            source, limits, stdin = HOSTILE[number % len(HOSTILE)], _HOSTILE_LIMITS, b""
        else:
            source, limits, stdin = _HONEST, Limits(cpu_s=60.0, wall_s=60.0), b"%d\n" % (1000 + number)
        future = sandbox.submit(_run_of(language, source, stdin, limits))
        futures.append(future)
        if not is_hostile[number]:
            future.add_done_callback(_since(time.perf_counter(), seconds))
            wanted.append(b"%d\n" % sum(range(1000 + number)))
    outputs = [future.result().stdout for future in futures]
    honest = [output for output, bad in zip(outputs, is_hostile, strict=True) if not bad]
    if honest != wanted:
        raise RuntimeError("an honest program wrote something else than it does")
    return _percentile(seconds)


def _since(came: float, seconds: list[float]) -> Callable[[object], None]:
    """Notes how long it has been when it is called."""
    return lambda _: seconds.append(time.perf_counter() - came)


def _run_of(language: toolchains.Toolchain, source: str, stdin: bytes, limits: Limits) -> Run:
    return language.running(source.encode(), stdin, limits)


def _percentile(seconds: Sequence[float]) -> float:
    value = float(np.quantile(np.asarray(seconds), 0.95))
    assert math.isfinite(value), "some were honest"
    return value
