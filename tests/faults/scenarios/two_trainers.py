"""A second trainer takes over while the first is suspended in the middle of a write: the first then writes nothing.

The first trainer is suspended (SIGSTOP, like a swapping machine or a cut network) at a random point: around a report, a
read, a phase of a weight update, or the commit of a checkpoint. A second trainer starts with a higher epoch and trains;
then the first is resumed. It must report that it is fenced, and end. Nothing that it tries until then may take effect:

    reports       no event of the controller mentions the first trainer's steps, publications or checkpoints
    weights       no rollout is sampled by weights that the first trainer published after the take-over
    checkpoints   no checkpoint of the first trainer is put in place, and the new trainer's checkpoints are complete
    trims         the first trainer trims no stream: its requests are rejected

Each seed is one run with three take-overs; each fences the trainer of the previous one.

Usually the second trainer removes the first one's incomplete checkpoints. Some take-overs suspend the second between
its claim of the directory and that removal, so that only the fence keeps the first from committing its checkpoint.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pipelinerl.errors import CheckpointError, PipelineError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.rng import generator
from pipelinerl.training.checkpoints.checkpoint import CheckpointFence, load
from tests.faults.cluster import running
from tests.faults.scenarios.scenario import Verdict
from tests.patience import PATIENCE_S

SHORT = range(1)
LONG = range(34)

TAKE_OVERS = 3
POINTS = ("append", "read", "update", "checkpoint", "trim")
WORDS = "has taken over"


@dataclass(slots=True)
class TakeOver:
    """The state after the second trainer has started and before the first is resumed."""

    epoch: int
    at: float = field(default_factory=time.time)
    events: int = 0
    checkpoints: dict[str, int] = field(default_factory=dict)
    newest_weights: int = 0
    claimed: bool = True
    """True if the second trainer had claimed the checkpoints; until then, the first may still commit one."""


def play(seed, directory, *, mutant="", take_overs=TAKE_OVERS):
    """Run the scenario with one seed; a mutant is suspended only where nothing but the fence could stop its writes."""
    broken: list[str] = []
    figures = Counter({"take-overs": 0, "in the middle of a write": 0, "held by the fence alone": 0})
    figures["writes after fencing"] = 0
    with running(directory, seed=seed, mutant=mutant) as cluster:
        cluster.supervised.add("trainer")  # restart a trainer that fails because it started during a take-over
        try:
            for number in range(take_overs):
                found = take_over(cluster, generator(seed, "take-over", number), figures, mutant=mutant)
                figures["take-overs"] += 1
                figures["writes after fencing"] += len(found)
                broken += [f"take-over {number}: {sentence}" for sentence in found]
        except (AssertionError, PipelineError) as error:
            broken.append(str(error))
    return Verdict(dict(figures), tuple(broken))


def take_over(cluster, random, figures, *, mutant):
    """Suspend the trainer, start a second, resume the first; return a sentence for each later effect of the first."""
    cluster.more_steps(3, "three steps before a take-over")
    first = cluster.processes.pop("trainer")
    try:
        # Suspend a mutant only once its checkpoint is durable: from an earlier point, a slow disk could delay its
        # commit until after it is fenced.
        operation = "durable" if mutant else str(random.choice(POINTS))
        patience_s = PATIENCE_S if mutant else 2.0
        points = int(random.integers(6))
        in_a_write = stop(cluster, first.pid, operation=operation, points=points, up_to_s=patience_s)
        figures["in the middle of a write"] += in_a_write
        # Suspend the second trainer only if the first is suspended at a checkpoint: at other points, the first may hold
        # the fence's lock.
        by_the_fence = in_a_write and (bool(mutant) or (operation == "checkpoint" and bool(random.integers(2))))
        figures["held by the fence alone"] += by_the_fence
        epoch = len(cluster.events("trainer_ready"))
        cluster.start("trainer", stopped_at="claimed" if by_the_fence else "")
        if by_the_fence:
            cluster.until(
                lambda: _is_stopped(cluster.processes["trainer"].pid), f"epoch {epoch + 1} to claim the checkpoints"
            )
        else:
            cluster.until(lambda: len(cluster.events("trainer_ready")) > epoch, f"epoch {epoch + 1}")
            head_start(cluster, up_to_s=float(random.choice([0.0, 0.1, 2.0])))
        seen = before(cluster, epoch)
        os.kill(first.pid, signal.SIGCONT)
        cluster.until(lambda: first.exitcode is not None, "the fenced trainer to end")
        written = list(put_in_place(cluster, seen))  # listed before the second trainer replaces them
        if by_the_fence:
            os.kill(cluster.processes["trainer"].pid, signal.SIGCONT)
    finally:
        first.kill()
        first.join()
    cluster.more_steps(3, f"three steps of epoch {epoch + 1}")
    written += after(cluster, seen, pid=first.pid)
    if first.exitcode != 2 or WORDS not in (cluster.directory / "trainer.log").read_text():
        written.append(f"the fenced trainer must end with status 2 and say so, it ended with {first.exitcode}")
    return written


def head_start(cluster, *, up_to_s):
    """Wait up to `up_to_s` for a step of the second trainer; a broadcast of the first trainer may block the second."""
    steps, deadline = len(cluster.events("step")), time.monotonic() + up_to_s
    while len(cluster.events("step")) == steps and time.monotonic() < deadline:
        time.sleep(0.01)


def stop(cluster, pid, *, operation, points, up_to_s):
    """Suspend the trainer at the given point, or after `up_to_s`; return True if it reached the point."""
    cluster.fuses["trainer"].light(operation, points, signal.SIGSTOP)
    deadline = time.monotonic() + up_to_s
    while time.monotonic() < deadline:
        if _is_stopped(pid):
            return True
        time.sleep(0.005)
    os.kill(pid, signal.SIGSTOP)
    cluster.fuses["trainer"].put_out()
    return False


def _is_stopped(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # the trainer has ended; the code that waits for it will report that
        return False


def before(cluster, epoch):
    sampled = [group["newest"] for group in cluster.witnessed("made") if group["epoch"] <= epoch]
    published = [event["model_version"] for event in cluster.events("publish")]
    served = cluster.served_weights()
    claimed = CheckpointFence(cluster.directory / "checkpoints").epoch > epoch  # read before the checkpoints are listed
    return TakeOver(
        epoch,
        events=len(_told(cluster)),
        checkpoints=_checkpoints(cluster),
        claimed=claimed,
        newest_weights=max([*sampled, *published, *([served[1]] if served[0] <= epoch else [])], default=0),
    )


def put_in_place(cluster, seen):
    """Yield a sentence for each checkpoint that the fenced trainer put in place after `seen`."""
    for name, inode in _checkpoints(cluster).items():
        path = cluster.directory / "checkpoints" / name
        if seen.claimed and seen.checkpoints.get(name) != inode and _epoch_of(path) == seen.epoch:
            yield f"it put {name} in place"


def after(cluster, seen, *, pid):
    """Yield a sentence for each effect of the fenced trainer after `seen`, other than a checkpoint."""
    # Read the events before the reports: a report is recorded before its event, so none of these lacks its report.
    events = _told(cluster)[seen.events :]
    reported = {(step["epoch"], step["version"]) for step in cluster.witnessed("trained")}
    for event in events:
        version = event["model_version"]
        if event["kind"] == "step" and not any((epoch, version) in reported for epoch in range(seen.epoch + 1, 99)):
            yield f"the controller took its report of step {version}"
        if event["kind"] == "checkpoint" and _epoch_of(Path(event["path"])) == seen.epoch:
            yield f"the controller took its report of {event['path']}"
    for group in cluster.witnessed("made"):
        if group["epoch"] <= seen.epoch and group["newest"] > seen.newest_weights and group["time"] > seen.at:
            yield f"an engine sampled order {group['index']} with its weights {group['epoch']}.{group['newest']}"
    for trim in cluster.witnessed("trimmed"):
        if trim["pid"] == pid and trim["requested_at"] > seen.at and trim["stream"].startswith(ROLLOUTS):
            yield f"it trimmed {trim['stream']}"


def _told(cluster):
    return [event for event in cluster.events() if event["kind"] in ("step", "checkpoint")]


def _checkpoints(cluster):
    """Return the inode of each checkpoint by name, without those that the second trainer removes meanwhile."""
    found = {}
    for path in (cluster.directory / "checkpoints").glob("step-*"):
        with suppress(FileNotFoundError):
            found[path.name] = path.stat().st_ino
    return found


def _epoch_of(path):
    try:
        return load(path).epoch
    except (CheckpointError, FileNotFoundError):
        return 0
