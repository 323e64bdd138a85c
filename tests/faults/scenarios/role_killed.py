"""Any role, or Redis, is killed (kill -9) at random points: no acknowledged rollout is lost, none trained twice.

A rollout group is acknowledged once the server has answered its append. Each acknowledged copy of a group must have one
of these outcomes, or it is lost:

    trained      in the lineage of the final weights, exactly once
    duplicate    an earlier copy of the same order in the stream was trained
    late         the order had ended before: its actor had reported a failure, and died before it acknowledged the order
    abandoned    the weights that sampled it were lost with a trainer; the order is issued again
    forgotten    the killed server had not written the group to disk: under `appendfsync everysec`, it may delay a
                 write while the disk is busy, and loses its newest entries. The order is issued again
    waiting      the next trainer will read the group, which lies after the offset of the newest checkpoint

Every issued order ends once or is in flight, so the ledger balances. Each seed is one run with five kills.
"""

import math
import time
from collections import Counter

from redis import Redis

from pipelinerl.commands.remote import controller_of
from pipelinerl.errors import PipelineError
from pipelinerl.messages import ROLLOUTS
from pipelinerl.rng import generator
from pipelinerl.training.checkpoints.checkpoint import CheckpointStore
from tests.faults.cluster import running
from tests.faults.scenarios.scenario import Verdict, unbalanced

SHORT = range(1)
LONG = range(40)

KILLS = 5
#: The operations around which each role may be killed. A role that does not perform the drawn operation is killed
#: after a while all the same; for example, a correct trainer never acknowledges.
POINTS = {
    "trainer": ("append", "read", "trim", "update", "checkpoint", "acknowledge"),
    "actor": ("append", "claim", "acknowledge", "renew"),
    "controller": ("append", "read", "trim", "last_id"),
    "engine": ("none",),  # it uses no stream, so it is killed at any moment
}
VICTIMS = {"trainer": 0.25, "actor": 0.25, "controller": 0.2, "engine": 0.15, "server": 0.15}
PARTITION = f"{ROLLOUTS}actor"


def play(seed, directory, *, mutant="", kills=KILLS):
    """Run the scenario with one seed, which determines the killed roles; a mutant run kills only its flawed trainer."""
    broken: list[str] = []
    forgotten: set[int] = set()
    figures = Counter[str]()
    with running(directory, seed=seed, mutant=mutant) as cluster:
        try:
            for number in range(kills):
                disturb(cluster, seed, number, forgotten, figures, mutant)
            settle(cluster)
        except (AssertionError, PipelineError) as error:
            broken.append(str(error))
        found = Findings(cluster, forgotten)
    figures |= Counter(
        {"acknowledged groups": len(found.made), "lost": len(found.lost), "trained twice": len(found.twice)}
    )
    broken += [f"order {index} is lost: {why}" for index, why in found.lost]
    broken += [f"order {index} was trained {times} times" for index, times in found.twice]
    broken += found.unbalanced
    order = ("kills", *(f"of {role}s" for role in VICTIMS), "acknowledged groups", "forgotten by a server", "lost")
    return Verdict({name: figures[name] for name in (*order, "trained twice")}, tuple(broken))


def disturb(cluster, seed, number, forgotten, figures, mutant):
    """Wait for two steps; then kill a process and restart it."""
    random = generator(seed, "kill", number)
    cluster.more_steps(2, f"two steps before kill {number}")
    victim = "trainer" if mutant else str(random.choice(list(VICTIMS), p=list(VICTIMS.values())))
    if victim == "server":
        time.sleep(random.uniform(0, 0.1))
        made = {group["entry"] for group in cluster.kill_server()}
        with Redis.from_url(cluster.server.url) as server:
            kept = {_number(entry_id) for entry_id, _ in server.xrange(f"chaos:{PARTITION}")}
        gone = {entry for entry in made - kept if entry > min(kept, default=0)}  # lower entries were trimmed, not lost
        forgotten |= gone
        figures["forgotten by a server"] += len(gone)
    else:
        operation = "acknowledge" if mutant else str(random.choice(POINTS[victim]))
        grace_s = random.uniform(0, 0.4) if operation == "none" else 0.4
        cluster.kill(victim, operation=operation, points=int(random.integers(0, 8)), grace_s=grace_s)
        cluster.start(victim)
    figures["kills"] += 1
    figures[f"of {victim}s"] += 1


def settle(cluster):
    """Wait for four more steps, then stop the run by a request to its controller."""
    cluster.more_steps(4, "four steps after the last kill")
    with controller_of(cluster.directory) as controller:
        controller.stop()
    cluster.until(lambda: cluster.events("run_finished"), "the end of the run", statuses=(0,))


def still_read(cluster, offset):
    """Return the stream entries that the next trainer will read; for a mutant, those that are not acknowledged."""
    key = f"chaos:{PARTITION}"
    with Redis.from_url(cluster.server.url) as server:
        kept = {_number(entry_id) for entry_id, _ in server.xrange(key)}
        for group in server.xinfo_groups(key):
            held = server.xpending_range(key, group["name"], min="-", max="+", count=10_000)
            delivered = _number(group["last-delivered-id"])
            return {entry for entry in kept if entry > delivered} | {_number(one["message_id"]) for one in held}
    return {entry for entry in kept if entry > offset}


def _number(entry_id):
    return int(entry_id.partition(b"-")[0])


class Findings:
    """The lost and repeated orders of a run, found in its witness files, event log, last checkpoint and stream."""

    def __init__(self, cluster, forgotten):
        self.made = sorted(cluster.witnessed("made"), key=lambda group: group["entry"])
        self._forgotten = forgotten
        self._failed = {event["order_id"]: event["time"] for event in reversed(cluster.events("group_failed"))}
        self._began = {event["epoch"]: event["model_version"] for event in cluster.events("trainer_ready")}
        latest = CheckpointStore(cluster.directory / "checkpoints", keep=2, model_directory=cluster.model).latest()
        offset = latest[1].offsets.get(PARTITION, "0-0") if latest is not None else "0-0"
        self._waiting = still_read(cluster, _number(offset.encode()))
        last = latest[1].model_version if latest is not None else None
        self._trained = self._lineage(cluster.witnessed("trained"), last)
        times = Counter(index for index, _ in self._trained)
        self.twice = sorted((index, count) for index, count in times.items() if count > 1)
        self.lost = sorted(self._lost())
        self.unbalanced = []
        for ledger in (event["ledger"] for event in cluster.events("run_finished")):
            self.unbalanced += unbalanced(ledger)
            if ledger["trained"] != len(self._trained):
                self.unbalanced.append(f"{len(self._trained)} groups were trained, and the ledger says {ledger}")

    def _lineage(self, steps, last):
        """Return the groups on which the newest checkpoint's weights were trained, as (order, copy).

        A step that was repeated counts once.
        """
        by_version: dict[int, tuple[int, list[tuple[int, str]]]] = {}
        for step in steps:
            epoch, version = step["epoch"], step["version"]
            cut_off = any(later > epoch and began < version for later, began in self._began.items())
            if not cut_off and (last is None or version <= last):
                by_version[version] = (epoch, [(index, copy) for index, copy in step["groups"]])
        return [group for _, groups in by_version.values() for group in groups]

    def _lost(self):
        trained = dict(self._trained)
        entry_of = {group["copy"]: group["entry"] for group in reversed(self.made)}
        for group in self.made:
            index, entry = group["index"], group["entry"]
            copy = trained.get(index)
            if copy is not None and entry_of.get(copy, -1) <= entry:
                continue  # this copy or an earlier copy of the same order was trained
            abandoned = any(later > group["epoch"] and began < group["newest"] for later, began in self._began.items())
            waiting = copy is None and entry in self._waiting
            late = self._failed.get(f"prompt-{index:06d}", math.inf) < group["time"]
            if not (late or abandoned or waiting or entry in self._forgotten):
                yield (
                    index,
                    f"its group {entry} was acknowledged, and "
                    + ("nothing of it was trained" if copy is None else "another was sampled and trained in its place"),
                )
