"""One of two engines runs half of the time (SIGSTOP and SIGCONT every 50 ms): it is named, and gets less work.

Both engines decode at a fixed pace and are always busy, so the run is as fast as the sum of their speeds.

    named    an event names the slow engine, and the status says how slow it is
    speed    the run keeps most of the speed that the two engines allow together
"""

import os
import signal
import threading
from contextlib import contextmanager

from pipelinerl.rng import generator
from tests.fakes.paced_bigram import ENGINE, set_pace
from tests.faults.cluster import model, recipe, running
from tests.faults.scenarios.scenario import Verdict

SHORT = range(1)
LONG = range(10)

#: The share of the speed that the engines allow: the aim on an idle machine is 0.9, a busy one blurs both rates.
LEAST_SHARE = 0.75
_HALF_S = 0.05
_DECODE_S = 0.01
_STEPS = 40


def play(seed, directory):
    """Slow one engine down, and compare the steps per second with those before."""
    names = ["engine-0", "engine-1"]
    set_pace(model(), decode_s=_DECODE_S, step_s=0.0)
    sections = {
        "engine": recipe(seed)["engine"] | {"type": ENGINE, "count": 2, "slots": 16},
        "sampling": recipe(seed)["sampling"] | {"max_tokens": 8},
        "optimizer": {"learning_rate": 1e-9},
        "staleness": {"j": 1, "k": 8},
    }
    with running(directory, seed=seed, engines=names, **sections) as cluster:
        cluster.until(lambda: len(cluster.events("engine_verified")) >= 2, "both engines to serve")
        usual = _steps_per_s(cluster)
        victim = names[generator(seed, "slow").integers(2)]
        url = f"http://127.0.0.1:{cluster.seats[victim].port}"
        with half_speed(cluster.processes[victim].pid):
            cluster.until(lambda: cluster.events("engine_slow"), "the slow engine to be named")
            slowed = _steps_per_s(cluster)
            speed = {engine["url"]: engine["speed"] for engine in cluster.status()["fleet"]["engines"]}[url]
    # A sleep that outlasts a suspension hides it, so the engine is faster than half: trust its decode steps.
    share = slowed / usual / ((1 + speed) / 2)
    broken = [f"{event['url']} is not slow" for event in cluster.events("engine_slow") if event["url"] != url]
    if share < LEAST_SHARE:
        broken.append(f"the run had {share:.2f} of the speed that its engines allow")
    figures = {
        "% of the speed that the engines allow": round(100 * share),
        "% speed of the slow engine as measured": round(100 * speed),
        "steps per 100 s before": round(100 * usual),
    }
    return Verdict(figures, tuple(broken))


def _steps_per_s(cluster):
    cluster.more_steps(_STEPS // 2)
    steps = cluster.more_steps(_STEPS + 1)[: _STEPS + 1]
    return _STEPS / (steps[-1]["elapsed_s"] - steps[0]["elapsed_s"])


@contextmanager
def half_speed(pid):
    over = threading.Event()

    def alternate():
        while not over.wait(_HALF_S):
            os.kill(pid, signal.SIGSTOP)
            over.wait(_HALF_S)
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
