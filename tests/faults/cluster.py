"""`Cluster`: the real roles of a small run, each in a process that can be killed and restarted quickly.

The processes are forked from a process that has imported everything, so a restart takes a fraction of a second. Streams
(`appendfsync everysec`), HTTP, gloo and checkpoints are real; the model is an untrained bigram, and its answers
are judged at random.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, final

import httpx

from pipelinerl.observability.events import Event, EventFollower
from pipelinerl.plugins.bigram.model import BigramModel
from pipelinerl.plugins.warmstart.tiny_decoder import char_tokenizer
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from pipelinerl.system.machine import free_ports, is_free
from tests.faults.role_process import MUTANTS, TOKEN, VERIFIER, Fuse, GroupEndpoint, play_role
from tests.patience import PATIENCE_S

GROUPS_PER_STEP, GROUP_SIZE = 4, 8

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.faults.role_process"])


@cache
def model() -> Path:
    """Return a bigram model that gives all texts the same probability; it is built once per process."""
    path = Path(mkdtemp(prefix="uniform-bigram-"))
    tokenizer = char_tokenizer(alphabet="0123456789+= ")
    BigramModel.random(len(tokenizer), seed=0, scale=0.0).save(path)
    tokenizer.save_pretrained(str(path), save_jinja_files=False)
    return path


def recipe(seed):
    """Return the recipe of a run that is longer than any test: four groups per step, a checkpoint every other step."""
    return {
        "run": {"name": "chaos", "seed": seed, "steps": 100_000},
        "model": {"path": str(model())},
        "engine": {"type": "bigram", "slots": 64, "context_length": 64},
        "trainer": {"type": "bigram"},
        "optimizer": {"learning_rate": 0.01},
        "domains": [{"name": "sums", "source": "addition", "verifier": VERIFIER}],
        "objective": {"preset": "pipelinerl"},
        "sampling": {"group_size": GROUP_SIZE, "max_tokens": 4},
        "training": {"rollouts_per_step": GROUPS_PER_STEP * GROUP_SIZE, "no_signal": "train", "deadline_s": 60.0},
        "staleness": {"j": 4, "k": float("inf")},
        "streams": {"max_groups": 4 * GROUPS_PER_STEP},
        "actor": {"groups_in_flight": 8},
        "evaluation": {"problems": 0},
        "checkpoint": {"interval_steps": 2, "keep": 2},
    }


@final
class Cluster:
    """The processes of one run's roles; create a cluster with `running`."""

    def __init__(self, directory, *, recipe, mutant, engines):
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.model = Path(recipe["model"]["path"])
        self.server = EmbeddedRedis(directory / "redis").start()
        self._controller, *of_engines = free_ports(1 + len(engines))
        urls = recipe.get("parameter_server", {}).get("urls", ())
        servers = {f"parameter-server-{number}": int(url.rpartition(":")[2]) for number, url in enumerate(urls)}
        roles = {
            "controller": "controller",
            **dict.fromkeys(engines, "engine"),
            **dict.fromkeys(servers, "parameter_server"),
            "trainer": "trainer",
            "actor": "actor",
        }
        ports = {"controller": self._controller, **dict(zip(engines, of_engines, strict=True)), **servers}
        self.seats = {
            name: GroupEndpoint(
                role=role,
                name=name,
                recipe=recipe,
                run_dir=directory,
                redis_url=self.server.url,
                controller_url=f"http://127.0.0.1:{self._controller}",
                port=ports.get(name, 0),
                mutant=mutant if MUTANTS[mutant][0] == role else "",
            )
            for name, role in roles.items()
        }
        self.fuses = {name: Fuse(seat.fuse) for name, seat in self.seats.items()}
        self.processes: dict[str, Any] = {}
        self._follower = EventFollower(directory / "events.jsonl")
        self._events: list[Event] = []
        self.supervised: set[str] = set()
        """Roles that are restarted when they end with status 1, as the launcher does."""

    def begin(self):
        self.start("controller")
        self.until(lambda: not is_free(self._controller), "the controller to listen")
        for name in self.seats:
            if name not in self.processes:
                self.start(name)

    def start(self, name, *, stopped_at=""):
        """Start a role's process, which must not be alive; it suspends itself (SIGSTOP) at `stopped_at`, if given."""
        self.fuses.setdefault(name, Fuse(self.seats[name].fuse)).put_out()
        if stopped_at:
            self.fuses[name].light(stopped_at, 0, signal.SIGSTOP)
        self.processes[name] = _FORKS.Process(target=play_role, args=(self.seats[name],), name=name)
        self.processes[name].start()

    def kill(self, name, *, operation, points, grace_s):
        """Kill the process after it passes `points` kill points around `operation`, or after `grace_s` seconds.

        Return True if the process passed that many points.
        """
        process = self.processes[name]
        self.fuses[name].light(operation, points)
        process.join(grace_s)
        reached = process.exitcode is not None
        process.kill()
        process.join()
        return reached

    def kill_server(self):
        """Kill and restart the stream server; return the groups that it had acknowledged before it died."""
        os.kill(self.server.pid, signal.SIGKILL)
        os.waitid(os.P_PID, self.server.pid, os.WEXITED | os.WNOWAIT)
        made = self.witnessed("made")
        self.server.start()
        return made

    def events(self, kind=""):
        """Return the events that the run has logged so far: those of this kind, or all if `kind` is empty."""
        self._events += self._follower.all()
        return [event for event in self._events if kind in ("", event["kind"])]

    def witnessed(self, name):
        """Return the records of a witness file (see role_process.py), such as `made` or `trained`."""
        path = self.directory / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

    def served_weights(self):
        url = f"http://127.0.0.1:{self.seats['engine'].port}/health"
        answer = httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S).raise_for_status()
        return answer.json()["epoch"], answer.json()["model_version"]

    def status(self):
        url = f"http://127.0.0.1:{self._controller}/status"
        return (
            httpx.get(url, headers={"authorization": f"Bearer {TOKEN}"}, timeout=PATIENCE_S).raise_for_status().json()
        )

    def until(self, reached, what, *, timeout_s=PATIENCE_S, statuses=()):
        """Wait until `reached` returns true; fail on a timeout, or if a role ends with a status not in `statuses`."""
        deadline = time.monotonic() + timeout_s
        while not reached():
            for name in self.supervised:
                if self.processes[name].exitcode == 1:
                    self.start(name)
            ended = [name for name, each in self.processes.items() if each.exitcode not in (None, *statuses)]
            if ended or time.monotonic() > deadline:
                reason = f"{', '.join(ended)} ended" if ended else f"{timeout_s:g} s were not enough"
                raise AssertionError(f"waiting for {what}: {reason}\n{self.story()}")
            time.sleep(0.01)

    def more_steps(self, number, what=""):
        first = len(self.events("step"))
        self.until(lambda: len(self.events("step")) >= first + number, what or f"{number} more steps")
        return self.events("step")[first:]

    def story(self):
        logs = sorted(self.directory.glob("*.log"))
        return "\n".join(f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-12:]) for log in logs)

    def end(self):
        for process in self.processes.values():
            process.kill()
            process.join()
        self.server.stop()


@contextmanager
def running(directory, *, seed, mutant="", engines=("engine",), **sections):
    """Yield a running cluster; `mutant` names a flawed design of one role, `sections` replace sections of `recipe`."""
    cluster = Cluster(directory, recipe=recipe(seed) | sections, mutant=mutant, engines=engines)
    try:
        cluster.begin()
        yield cluster
    finally:
        cluster.end()
