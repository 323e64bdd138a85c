"""Second controllers are started on a live run: each is rejected, the event log stays whole, and the run continues.

Two at a time are started at random moments, as by an operator who runs a command twice or a script that starts it on
two machines. Half of them ask for the port of the run's own controller. At the end, that controller is killed and
started again without --continue, which is rejected, too, and then with it.

    rejected    each ends with status 1 or 2 within its deadline, and its message says what to do
    whole       every line of events.jsonl is a record, the run started once, and no step is missing or repeated
    continues   the run takes further steps after each attempt and after the return, and its ledger balances
"""

import json
import time
from dataclasses import replace

from pipelinerl.rng import generator
from pipelinerl.system.machine import free_ports
from tests.faults.cluster import running
from tests.faults.scenarios.scenario import Verdict, unbalanced
from tests.patience import PATIENCE_S

SHORT = range(1)
LONG = range(20)

_ROUNDS = 2
_WORDS = ("--continue", "is taken", "already in use")


def play(seed, directory):
    """Start two more controllers in each round, and let the run take a few steps after each round."""
    draw, broken = generator(seed, "second controller"), list[str]()
    with running(directory, seed=seed) as cluster:
        cluster.more_steps(2)
        for number in range(_ROUNDS):
            time.sleep(float(draw.uniform(0.0, 0.5)))
            (free,) = free_ports(1)
            ports = {f"second-{number}": free, f"third-{number}": cluster.seats["controller"].port}
            for name, port in ports.items():
                start(cluster, name, port=port)
            broken += [sentence for name in ports for sentence in rejection(cluster, name)]
            cluster.more_steps(3)
        cluster.kill("controller", operation="append", points=int(draw.integers(0, 20)), grace_s=1.0)
        del cluster.processes["controller"]
        time.sleep(float(draw.uniform(0.0, 2.0)))
        start(cluster, "again", port=cluster.seats["controller"].port)
        broken += rejection(cluster, "again", words=_WORDS[:1])
        cluster.start("controller")
        cluster.until(lambda: cluster.events("controller_returned"), "the controller's return")
        cluster.more_steps(3)
        broken += amiss(cluster)
    return Verdict({"controllers rejected": 2 * _ROUNDS + 1 - len(broken)}, tuple(broken))


def start(cluster, name, *, port):
    """Start a controller of the cluster's run under another name, as `pipelinerl controller` without --continue."""
    cluster.seats[name] = replace(cluster.seats["controller"], role="controller_afresh", name=name, port=port)
    cluster.start(name)


def rejection(cluster, name, *, words=_WORDS):
    """Wait for the end of the controller `name`; yield a sentence unless it was rejected with a remedy."""
    process = cluster.processes.pop(name)
    process.join(PATIENCE_S)
    status = process.exitcode
    process.kill()
    log = (cluster.directory / f"{name}.log").read_text()
    if status not in (1, 2):
        yield f"{name} ended with {status}, expected a rejection: {log[-600:]}"
    elif not any(word in log for word in words) or "Traceback" in log:
        yield f"{name} was rejected without a remedy: {log[-600:]}"


def amiss(cluster):
    """Yield a sentence for each torn line, repeated step, second start or end, and for an unbalanced ledger."""
    for line in (cluster.directory / "events.jsonl").read_bytes().split(b"\n")[:-1]:
        try:
            json.loads(line)
        except ValueError:
            yield f"a line of events.jsonl is torn: {line[:200]!r}"
    steps = [event["step"] for event in cluster.events("step")]
    if steps != list(range(1, len(steps) + 1)):
        yield f"the steps are {steps}, expected each once"
    if len(cluster.events("run_started")) != 1:
        yield "the run started more than once"
    yield from (
        f"the run has ended: {event}" for kind in ("run_finished", "run_failed") for event in cluster.events(kind)
    )
    yield from unbalanced(cluster.status()["ledger"])
