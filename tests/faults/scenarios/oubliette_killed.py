"""An Oubliette service is killed with kill -9 during its work: every answer gets one verdict, the right one.

A verifier calls `pipelinerl sandbox serve` as in an actor. The service dies at random moments and restarts at its
address without its results and compiled programs. In the end no process, control group or mount of a dead service may
be left.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import sys
from typing import Final

from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.verifier import Oubliette
from pipelinerl.system.machine import free_ports
from pipelinerl.types import Message, Outcome, Problem
from tests.faults.scenarios.scenario import Verdict
from tests.faults.scenarios.verifier_killed import MortalService, judged_by, until
from tests.patience import PATIENCE_S

SHORT = range(1)
LONG = range(10)

_KILLS: Final = 5
#: The number of answers that are judged at the same time.
_AT_ONCE: Final = 6
_C: Final = (
    '#include <stdio.h>\nint main(void) {{ int n; return scanf("%d", &n) != 1 || printf("%d\\n", {} * n) < 0; }}'
)


def play(seed, directory, *, kills=_KILLS):
    if not shutil.which("bwrap"):
        return Verdict({"left out for want of bubblewrap": 1})
    (port,) = free_ports(1)
    words = ["oubliette", "serve", "--repository", str(directory / "repository"), "--port", str(port), "--at-once", "2"]
    service = MortalService([sys.executable, "-m", "pipelinerl.cli", *words])
    return judged_by([service], lambda started: _judged(random.Random(seed), service, port, started, kills))


async def _judged(draw, service, port, started, kills):
    languages = ("python", "c") if shutil.which("gcc") else ("python",)
    rules = OublietteSection(languages=languages, time_limit_s=PATIENCE_S, url=f"http://127.0.0.1:{port}")
    verifier = Oubliette(rules, deadline_s=PATIENCE_S)
    figures, broken, over = {"kills": 0, "answers": 0, "lost": 0, "wrong": 0}, list[str](), asyncio.Event()

    async def work(number):
        while not over.is_set() and not broken:
            number += _AT_ONCE
            right, language = bool(draw.randrange(2)), draw.choice(languages)
            verdict = await verifier.verify(_problem(number), _answer(language, 2 if right else 3))
            figures["answers"] += 1
            figures["lost"] += not verdict.outcome.is_judgement
            figures["wrong"] += verdict.outcome.is_judgement and (verdict.outcome is Outcome.CORRECT) != right
            if figures["lost"] or figures["wrong"]:
                broken.append(f"answer {number} in {language}, which is {right}, was judged {verdict}")

    workers = [asyncio.create_task(work(number)) for number in range(_AT_ONCE)]
    try:
        for _ in range(kills):
            before = figures["answers"]
            await until(lambda before=before: figures["answers"] >= before + _AT_ONCE or bool(broken))
            await asyncio.sleep(draw.random() * 0.2)
            started += await asyncio.to_thread(service.kill)
            figures["kills"] += 1
            await asyncio.to_thread(service.start)
    finally:
        over.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*workers)
        await verifier.close()
    return figures, broken


def _problem(number):
    return Problem(
        problem_id=f"code:{number}",
        domain="code",
        messages=(Message("user", "Double it."),),
        ground_truth="",
        metadata={"tests": [{"input": f"{n}\n", "output": f"{2 * n}\n"} for n in (number, number + 1)]},
    )


def _answer(language, times):
    code = f"print({times} * int(input()))" if language == "python" else _C.format(times)
    return f"```{language}\n{code}\n```"
