"""An Oubliette service is killed with kill -9 during its work: every answer gets one verdict, the right one.

A verifier calls `pipelinerl sandbox serve` as in an actor. The service dies at random moments and restarts at its
address without its results and compiled programs. In the end no process, control group or mount of a dead service may
be left.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
from typing import Final

import psutil

from pipelinerl.plugins.oubliette.section import OublietteSection
from pipelinerl.plugins.oubliette.verifier import Oubliette
from pipelinerl.system.machine import free_ports
from pipelinerl.types import Message, Outcome, Problem
from tests.faults.scenarios.scenario import Verdict
from tests.faults.scenarios.verifier_killed import _groups, _is_alive, _mounts, _still_there, _until
from tests.patience import PATIENCE_S

SHORT = range(1)
LONG = range(10)

_KILLS: Final = 5
#: The number of answers that are judged at the same time.
_AT_ONCE: Final = 6
_C: Final = (
    '#include <stdio.h>\nint main(void) {{ int n; return scanf("%d", &n) != 1 || printf("%d\\n", {} * n) < 0; }}'
)


class _Service:
    def __init__(self, repository):
        self.repository = repository
        (self.port,) = free_ports(1)
        self.lives: list[int] = []
        self.process: subprocess.Popen[str]

    def start(self):
        words = ["oubliette", "serve", "--repository", str(self.repository), "--port", str(self.port), "--at-once", "2"]
        command = [sys.executable, "-m", "pipelinerl.cli", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self.lives.append(self.process.pid)
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("the Oubliette service did not start; what it said stands above")

    def kill(self):
        """Kill the service's own process; return the processes that it had started."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return children


def play(seed, directory, *, kills=_KILLS):
    if not shutil.which("bwrap"):
        return Verdict({"left out for want of bubblewrap": 1})
    service = _Service(directory / "repository")
    started: list[psutil.Process] = []
    try:
        service.start()
        figures, broken = asyncio.run(_judged(random.Random(seed), service, started, kills))
    finally:
        if service.lives:
            started += service.kill()
    left = _still_there(lambda: [each for each in started if _is_alive(each)])
    groups, mounts = _still_there(lambda: _groups(service.lives)), _still_there(_mounts)
    figures |= {"processes left": len(left), "control groups left": len(groups), "mounts left": len(mounts)}
    broken += [f"process {each} outlives its service" for each in left]
    broken += [f"{each} outlives its service" for each in (*groups, *mounts)]
    return Verdict(figures, tuple(broken))


async def _judged(draw, service, started, kills):
    languages = ("python", "c") if shutil.which("gcc") else ("python",)
    rules = OublietteSection(languages=languages, time_limit_s=PATIENCE_S, url=f"http://127.0.0.1:{service.port}")
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
            await _until(lambda before=before: figures["answers"] >= before + _AT_ONCE or bool(broken))
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
