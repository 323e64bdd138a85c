"""A verifier service is killed with kill -9 during its work: every answer gets one verdict, the right one.

Two real services judge groups for one client, as for an actor; odd seeds judge programs in sandboxes, if bubblewrap is
installed. At random moments one service is killed and restarted. In the end no process, control group or mount of a
dead service may be left.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import psutil

from pipelinerl.plugins.verifier_service.client import VerifierServices
from pipelinerl.system.machine import free_ports
from pipelinerl.system.service_client import ServicePatience
from pipelinerl.types import Outcome
from pipelinerl.verifiers.verifier import SampledAnswer
from tests.fakes.verifier_service import RULES, TOKEN, lease, problem
from tests.faults.scenarios.scenario import Verdict
from tests.patience import PATIENCE_S, is_running

SHORT = range(2)
LONG = range(50)

#: The number of groups that are judged at the same time, and the number of answers per group.
_AT_ONCE: Final = 6
_ANSWERS: Final = 4


class MortalService:
    """A service in a process of its own, which prints a line once it listens; it may be killed and started again."""

    def __init__(self, command):
        self._command = command
        self.lives: list[int] = []
        self.process: subprocess.Popen[str]

    def start(self):
        self.process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self.lives.append(self.process.pid)
        assert self.process.stdout is not None
        if not self.process.stdout.readline():
            raise RuntimeError("the service did not start; its message stands above")

    def kill(self):
        """Kill the service's own process; return the processes that it had started."""
        children = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(PATIENCE_S)
        assert self.process.stdout is not None
        self.process.stdout.close()
        return children


def judged_by(services, judge):
    """Start the services, and let `judge` use and kill them; return the verdict, with what outlives its service.

    `judge` is a function `(started) -> (figures, broken)`, where `started` collects the processes of killed services.
    """
    started: list[psutil.Process] = []
    try:
        for service in services:
            service.start()
        figures, broken = asyncio.run(judge(started))
    finally:
        for service in services:
            started += service.kill() if service.lives else []
    lives = [life for service in services for life in service.lives]
    left = _still_there(lambda: [each for each in started if is_running(each.pid)])
    groups, mounts = _still_there(lambda: _groups(lives)), _still_there(_mounts)
    figures |= {"processes left": len(left), "control groups left": len(groups), "mounts left": len(mounts)}
    broken += [f"{each} outlives its service" for each in (*left, *groups, *mounts)]
    return Verdict(figures, tuple(broken))


def play(seed, directory, *, kills=1):
    domain = "code" if seed % 2 and shutil.which("bwrap") else "words"
    command = [sys.executable, "-m", "tests.fakes.verifier_service", domain]
    services = {f"http://127.0.0.1:{port}": MortalService([*command, str(port)]) for port in free_ports(2)}
    return judged_by(services.values(), lambda started: _judged(random.Random(seed), domain, services, started, kills))


async def _judged(draw, domain, services, started, kills):
    client = VerifierServices(token=TOKEN, patience=ServicePatience(grace_s=PATIENCE_S))
    figures, broken, over = {"kills": 0, "groups": 0, "lost": 0, "wrong": 0}, list[str](), asyncio.Event()

    def lease_all():
        lives = {url: str(len(service.lives)) for url, service in services.items()}
        client.update([lease(url, life=life, domains=(domain,)) for url, life in lives.items()])

    async def work(number):
        while not over.is_set():
            number += _AT_ONCE
            posed = problem(number, domain=domain, tests=[{"input": "", "output": f"{number}"}])
            right = [bool(draw.randrange(2)) for _ in range(_ANSWERS)]
            judged = await client.judge(domain, RULES, posed, [_answer(domain, number, each) for each in right])
            outcomes = [judgement.verdict.outcome for judgement in judged]
            figures["groups"] += 1
            figures["lost"] += _ANSWERS - sum(outcome.is_judgement for outcome in outcomes)
            figures["wrong"] += [outcome is Outcome.CORRECT for outcome in outcomes] != right
            if len(judged) != _ANSWERS or figures["lost"] or figures["wrong"]:
                broken.append(f"group {number} of {right} was judged {[each.verdict for each in judged]}")
                return

    lease_all()
    workers = [asyncio.create_task(work(number)) for number in range(_AT_ONCE)]
    try:
        for _ in range(kills):
            before = figures["groups"]
            await until(lambda before=before: figures["groups"] >= before + _AT_ONCE or bool(broken))
            await asyncio.sleep(draw.random() * 0.2)
            victim = draw.choice([*services.values()])
            started += await asyncio.to_thread(victim.kill)
            figures["kills"] += 1
            await asyncio.to_thread(victim.start)
            lease_all()
    finally:
        over.set()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*workers)
        await client.close()
    return figures, broken


def _answer(domain, number, right):
    printed = number if right else -number
    return SampledAnswer(f"```python\nprint({printed})\n```" if domain == "code" else str(printed))


async def until(holds):
    assert callable(holds)
    async with asyncio.timeout(PATIENCE_S):
        while not holds():
            await asyncio.sleep(0.01)


def _still_there(find):
    """Call `find` until it finds nothing or a deadline passes, as killed processes end late; return its last result."""
    deadline = time.monotonic() + PATIENCE_S
    while (found := find()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def _groups(lives):
    found = Path("/sys/fs/cgroup").rglob("oubliette-*")
    return [str(path) for path in found if path.name.split("-")[1] in map(str, lives)]


def _mounts():
    """Return the bubblewrap mounts that this process sees; there should be none outside the sandboxes."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if any(place in line for place in ("/newroot", "/oldroot", "oubliette/guest"))]
