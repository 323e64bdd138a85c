"""An engine freezes (SIGSTOP) and thaws later: the others continue, its answers move, and it returns by a canary.

A frozen process keeps its connections and answers nothing, like a swapping machine or a hung driver. Seeds alternate
between two engines and eight, and every third and fourth one pulls its weights after announcements instead of a
broadcast. The engine freezes at a random moment, often in the middle of a weight update.

    longest gap    no two steps are further apart than the fleet's limit, which grows with the pace before the fault
    named          an event and the status name the frozen engine
    returns        after SIGCONT the engine serves again, with the current weights
"""

import os
import signal
import statistics
import time
from itertools import pairwise
from typing import Any

from pipelinerl.rng import generator
from pipelinerl.system.machine import free_ports
from tests.faults.cluster import recipe, running
from tests.faults.scenarios.scenario import Verdict

SHORT = range(3)
LONG = range(20)

#: Engines of a run, and the longest gap in seconds between two steps that a frozen engine may cause on an idle machine.
FLEETS = ((2, 5.0), (8, 2.0))
#: On a busy machine, the limit is this many times the longest gap before the fault, if that is longer.
_BUSY = 5.0
_STEPS = 20
_FROZEN_S = 8.0


def play(seed, directory):
    """Freeze one engine for a few seconds while the run trains."""
    count, limit_s = FLEETS[seed % len(FLEETS)]
    names = [f"engine-{number}" for number in range(count)]
    engine = recipe(seed)["engine"] | {"count": count}
    transport, pulls = dict[str, Any](), bool(seed // len(FLEETS) % 2)
    if pulls:
        (port,) = free_ports(1)
        transport["weights"] = {"transport": "pull", "announce": "stream"}
        transport["parameter_server"] = {"urls": [f"http://127.0.0.1:{port}"]}
    random = generator(seed, "frozen")
    with running(
        directory, seed=seed, engines=names, engine=engine, staleness={"j": 1, "k": 8}, **transport
    ) as cluster:
        cluster.until(lambda: len(cluster.events("engine_verified")) >= count, f"{count} engines to serve")
        usual = _gaps(cluster.more_steps(_STEPS))
        victim, wait_s = names[random.integers(count)], float(random.uniform(0.0, 0.3))
        time.sleep(wait_s)
        process, began = cluster.processes[victim], len(cluster.events())
        url = f"http://127.0.0.1:{cluster.seats[victim].port}"
        os.kill(process.pid, signal.SIGSTOP)
        steps = len(cluster.events("step"))
        time.sleep(_FROZEN_S)
        os.kill(process.pid, signal.SIGCONT)
        cluster.until(lambda: _returned(cluster.events()[began:], url), f"{victim} to serve again")
        cluster.until(lambda: len(cluster.events("step")) >= steps + _STEPS, f"{_STEPS} more steps")
        gaps = _gaps(cluster.events("step")[max(0, steps - 1) :])
        events = cluster.events()[began:]
    longest, allowed = max(gaps), max(limit_s, _BUSY * max(usual))
    fleet = f"{count} engines{' that pull' if pulls else ''}"
    figures = {
        f"ms longest gap of {fleet}": round(1000 * longest),
        f"ms usual gap of {fleet}": round(1000 * statistics.median(usual)),
    }
    return Verdict(figures, tuple(_broken(events, url, longest=longest, allowed=allowed)))


def _broken(events, url, *, longest, allowed):
    if longest > allowed:
        yield f"two steps were {longest:.1f} s apart, more than {allowed:.1f} s"
    if not any(event["kind"] in ("engine_suspect", "engine_lost") and event["url"] == url for event in events):
        yield f"no event names {url}"
    others = {event["url"] for event in events if event["kind"] == "engine_lost" and event["url"] != url}
    if others:
        yield f"healthy engines were lost: {', '.join(sorted(others))}"


def _returned(events, url):
    """Return True if the engine's last event says that it serves."""
    kinds = [event["kind"] for event in events if event.get("url") == url]
    return bool(kinds) and kinds[-1] in ("engine_back", "engine_verified")


def _gaps(steps):
    return [after["elapsed_s"] - before["elapsed_s"] for before, after in pairwise(steps)]
