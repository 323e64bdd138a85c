"""A process of the trainer's mesh is killed (kill -9): the other process ends, no group is lost or trained twice.

Each seed is one real run with five kills of a random rank at random moments. After each, the other rank must end, and
both must restart from the newest checkpoint. At the end the ledger balances, and every step has trained
`GROUPS_IN_A_STEP` groups. Deaths noticed within a second are counted but not required, because they depend on the
machine's load.
"""

import time
from collections import Counter

from pipelinerl.commands.remote import controller_of
from pipelinerl.errors import PipelineError
from pipelinerl.rng import generator
from tests.fakes.live_run import launched, new_run
from tests.faults.scenarios.scenario import Verdict, unbalanced
from tests.patience import PATIENCE_S, is_running

SHORT = range(1)
LONG = range(10)

KILLS = 5
SETTINGS = (
    "trainer.options.mesh.dp_shard=2",
    "run.steps=100000",
    "checkpoint.interval_steps=2",
    "launch.restarts=1000",
)
#: The `rollouts_per_step` of `tests.fakes.live_run.SMALL`, divided by its eight rollouts per group.
GROUPS_IN_A_STEP = 8


def play(seed, directory):
    figures, broken = Counter[str](), []
    with launched(new_run(directory / "run", *SETTINGS), directory / "run") as run:
        try:
            for number in range(KILLS):
                disturb(run, seed, number, figures)
            run_on(run, steps=2)
            with controller_of(run.directory) as controller:
                controller.stop()
            if run.end() != 0:
                broken.append(f"the run failed:\n{run.story()}")
        except (AssertionError, PipelineError) as error:
            broken.append(str(error))
        broken += contradictions(run, figures)
    order = ("kills", "of rank 0", "of rank 1", "found within 1 s", "trained groups")
    return Verdict({name: figures[name] for name in order}, tuple(broken))


def disturb(run, seed, number, figures):
    """Wait for two steps; then kill one rank, and check that the other rank ends and that both are restarted."""
    random = generator(seed, "rank", number)
    run_on(run, steps=2)
    (other,) = (
        each for each in run.note_processes().values() if is_running(each.pid) and "trainer-rank" in each.cmdline()
    )
    ranks, lives = (run.role("trainer"), other), len(run.events("trainer_ready"))
    rank = int(random.integers(2))
    time.sleep(random.uniform(0, 1))  # a random wait, so that the kill can happen anywhere in a step
    killed = time.monotonic()
    ranks[rank].kill()
    while is_running(ranks[1 - rank].pid):
        assert time.monotonic() < killed + PATIENCE_S, f"rank {1 - rank} outlives rank {rank}:\n{run.story()}"
        time.sleep(0.005)
    figures["found within 1 s"] += time.monotonic() - killed <= 1.0
    run.until(lambda run: len(run.events("trainer_ready")) > lives, f"the trainer's return after kill {number}")
    figures["kills"] += 1
    figures[f"of rank {rank}"] += 1


def run_on(run, *, steps):
    """Wait until the run has made `steps` further steps; a step that repeats a version counts too."""
    before = len(run.steps())
    run.until(lambda run: len(run.steps()) >= before + steps, f"{steps} further steps")


def contradictions(run, figures):
    """Return a sentence for each contradiction between the final ledger and the version of the run's last step.

    A trainer that was killed before its checkpoint was complete may have reached a later version, which does not count.
    """
    finished = run.events("run_finished")
    if not finished:
        return []
    ledger, versions = finished[-1]["ledger"], run.steps()[-1]
    figures["trained groups"] += ledger["trained"]
    broken = unbalanced(ledger)
    if ledger["trained"] != GROUPS_IN_A_STEP * versions:
        broken.append(f"{versions} versions of {GROUPS_IN_A_STEP} groups each, and the ledger says {ledger}")
    return broken
