"""The controller is killed between any two side effects; prompts, directives, events and ledger are unchanged.

Each seed plays a random run of the pure controller with and without deaths, and kills the service of a scripted run at
some crash points: before or after an append, a trim or a line of the event log.
"""

import asyncio

from pipelinerl.rng import generator
from tests.controller.service.test_journal import NEVER, live, same_with_and_without_deaths
from tests.faults.scenarios.scenario import Verdict

#: Few seeds suffice, because tests/controller/service/test_journal.py tests every crash point and 10,000 random runs.
SHORT = range(2)
LONG = range(100)

STEPS = 6
CRASHES = 4


def play(seed, directory):
    broken = []
    try:
        same_with_and_without_deaths(seed)
    except AssertionError as error:
        broken.append(str(error))
    undisturbed, points = asyncio.run(live(directory / "undisturbed", steps=STEPS, kill_at=NEVER))
    chosen = generator(seed, "crash points").choice(points, size=CRASHES, replace=False) + 1
    for kill_at in map(int, chosen):
        outcome, _ = asyncio.run(live(directory / str(kill_at), steps=STEPS, kill_at=kill_at))
        if outcome != undisturbed:
            broken.append(f"killed at point {kill_at} of {points}: other prompts, directives or events")
    return Verdict({"kills": CRASHES, "runs with deaths": 1, "that differ": len(broken)}, tuple(broken))
