"""A controller is killed and started again without --continue: it is refused with the word to type, and the run waits.

Then it is started with --continue and the run continues from the same state.

    refused     the second controller ends with status 2, and its message names --continue
    no end      engine, trainer and actor stay alive, and the event log has no end of the run
    continues   with --continue, the run takes further steps; none is missing or repeated, and the ledger balances
"""

import time

from pipelinerl.rng import generator
from tests.faults.cluster import running
from tests.faults.scenarios import second_controller
from tests.faults.scenarios.scenario import Verdict

SHORT = range(1)
LONG = range(20)


def play(seed, directory):
    """Kill the controller at a random moment, and start it again without and then with --continue."""
    draw, broken = generator(seed, "controller without continue"), list[str]()
    with running(directory, seed=seed) as cluster:
        cluster.until(lambda: len(cluster.events("step")) >= 2, "two steps")
        time.sleep(float(draw.uniform(0.0, 0.5)))
        cluster.kill("controller", operation="append", points=int(draw.integers(0, 20)), grace_s=1.0)
        del cluster.processes["controller"]
        time.sleep(float(draw.uniform(0.0, 2.0)))
        second_controller.start(cluster, "again", port=cluster.seats["controller"].port)
        broken += second_controller.rejection(cluster, "again")
        log = (cluster.directory / "again.log").read_text()
        if "--continue" not in log:
            broken.append(f"the refusal does not name --continue: {log[-600:]}")
        cluster.start("controller")
        cluster.until(lambda: cluster.events("controller_returned"), "the controller's return")
        steps = len(cluster.events("step"))
        cluster.until(lambda: len(cluster.events("step")) >= steps + 3, "three more steps")
        broken += second_controller.amiss(cluster)
    return Verdict({"controllers refused": 1}, tuple(broken))
