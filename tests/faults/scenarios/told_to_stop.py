"""SIGTERM to a run at any moment, its start included: no step is lost, the run ends in time and can be resumed.

A small run is stopped and resumed repeatedly with `pipelinerl run` and `run --resume`, as by Slurm, a pod's end or a
spot machine's notice. At each stop the launcher must end within Kubernetes' default grace period and leave no process;
the next launch must start at the last logged step. In the end no step is missing and no order was trained twice.
"""

import signal
import subprocess
import time

from pipelinerl.rng import generator
from tests.fakes.live_run import CLI, endless_run, launched, resumed
from tests.faults.scenarios.scenario import Verdict, unbalanced
from tests.patience import PATIENCE_S

SHORT = range(1)
LONG = range(10)

GRACE_S = 30.0
#: SIGTERM comes at a random moment within this many seconds of the launch; a run needs three or four to start.
_WITHIN_S = 12.0


def play(seed, directory, *, times=5):
    draw, path, broken = generator(seed, "told to stop"), directory / "run", list[str]()
    steps, slowest_s = 0, 0.0
    for number in range(times):
        with launched(_arguments(path), path) as run:
            time.sleep(float(draw.uniform(0.0, _WITHIN_S)))
            run.note_processes()
            told_at = time.monotonic()
            run.launcher.send_signal(signal.SIGTERM)
            status = run.end()
            took_s = time.monotonic() - told_at
            where = f"notice {number}, at step {max(run.steps(), default=0)}"
            broken += [f"{where}: {what}" for what in _amiss(run, status, took_s, began_at=steps)]
            steps, slowest_s = max(run.steps(), default=0), max(slowest_s, took_s)
    with launched(_arguments(path), path) as run:
        run.until_step(steps + 2)
        subprocess.run([*CLI, "stop", str(path)], check=True, capture_output=True, timeout=PATIENCE_S)
        if (status := run.end()) != 0:
            broken.append(f"the last life ended with {status}:\n{run.story()}")
        broken += _unlike_one_run(run)
    figures = {"notices": times, "steps": max(run.steps()), "s to end (the longest of each seed)": round(slowest_s)}
    return Verdict(figures, tuple(broken))


def _arguments(path):
    """Return the arguments that resume the run, or start it again if it was stopped before it wrote anything."""
    return resumed(path) if (path / "recipe.toml").is_file() else endless_run(path)


def _amiss(run, status, took_s, *, began_at):
    found = []
    if status not in (130, 143, -signal.SIGTERM):
        found.append(f"ended with {status}:\n{run.story()}")
    if took_s > GRACE_S:
        found.append(f"took {took_s:.1f} s to end, expected at most {GRACE_S:g}")
    if not run.is_gone():
        found.append(f"left {run.alive()}")
    if "Traceback" in run.output:
        found.append(f"a traceback:\n{run.output}")
    ready = [event["model_version"] for event in run.events("trainer_ready")]
    lives = len(run.events("run_suspended"))
    if ready and len(ready) > lives - 1 and ready[-1] < began_at:
        found.append(f"began at {ready[-1]}, and the life before came to {began_at}")
    return found


def _unlike_one_run(run):
    steps, complaints = run.steps(), []
    if steps != list(range(1, max(steps) + 1)):
        complaints.append(f"the steps of all lives are {steps}, expected each once")
    orders = [order for event in run.events("step") for order in event["orders"]]
    if len(orders) != len(set(orders)):
        complaints.append("orders were trained twice")
    return complaints + unbalanced(run.events("run_finished")[-1]["ledger"])
