"""Every role is killed, suspended or starved by its machine: no prompt order is lost or trained twice, no process left.

`pipelinerl run` runs bigram roles in one situation per seed. Then the run must take steps, end on request, balance its
ledger, and train each prompt order once in the lineage of the last weights. If no run can start, the launcher must say
so in one sentence and start nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from enum import IntEnum
from typing import Final

import psutil

from pipelinerl.commands.remote import controller_of
from pipelinerl.config.recipe import parse, save
from pipelinerl.errors import UserError
from pipelinerl.rng import generator
from tests.fakes.live_run import LiveRun, launched, resumed
from tests.faults.cluster import recipe
from tests.faults.scenarios.scenario import Verdict, unbalanced


class Situation(IntEnum):
    KILLS = 0
    STANDSTILL = 1
    TERMINAL_CLOSED = 2
    FEW_FILES = 3
    PORT_TAKEN = 4
    CLOCK_JUMPS = 5
    NO_SHARED_MEMORY = 6
    READ_ONLY = 7


#: The seeds of `make test`: only the situation READ_ONLY, because a run whose processes are killed takes a minute.
SHORT = range(Situation.READ_ONLY, Situation.READ_ONLY + 1)
#: The seeds of `make chaos`: each situation once, and `KILLS` (multiples of 8) twenty times, with ten kills each.
LONG = (*range(8), *range(8, 8 * 20, 8))

ROLES: Final = ("controller", "engine-0", "actor-0", "trainer", "redis")
_KILLS: Final = 10
_STANDS_STILL_S: Final = 20.0
_WAIT_S: Final = 180.0
#: A `sitecustomize` that shifts the wall clock by up to an hour every second; the monotonic clock is unaffected.
_JUMPING: Final = """
import random, time
_true, _drawn = time.time, random.Random()
def _jumping():
    now = _true()
    _drawn.seed(int(now))
    return now + _drawn.uniform(-3600.0, 3600.0)
time.time = _jumping
"""


def play(seed, directory):
    situation, figures = Situation(seed % len(Situation)), Counter[str]()
    figures[f"runs with {situation.name.lower().replace('_', ' ')}"] = 1
    written = directory / "recipe.toml"
    domains = [{"name": "sums", "source": "addition", "verifier": "math_answer"}]
    save(parse(recipe(seed) | {"launch": {"restarts": 1000}, "domains": domains}), written)
    path = directory / "runs" / "run"
    arguments = [str(written), f"run.directory={path.parent}", f"run.name={path.name}"]
    if situation is Situation.READ_ONLY:
        return Verdict(figures, tuple(_read_only(arguments, path)))
    through, environment = _prepared(situation, directory)
    broken: list[str] = []
    with launched(arguments, path, through=through, environment=environment) as run:
        run.until_step(2, _WAIT_S)
        if situation is Situation.TERMINAL_CLOSED:
            broken += _closed(run)
        else:
            _TROUBLE.get(situation, _nothing)(run, seed, figures)
            broken += _settled(run)
    if situation is Situation.TERMINAL_CLOSED:
        with launched(resumed(path), path) as run:
            steps = len(run.steps())
            run.until(lambda run: len(run.steps()) >= steps + 2, "two steps after the resumption", _WAIT_S)
            broken += _settled(run)
    return Verdict(figures, tuple(broken))


def _prepared(situation, directory):
    """Return the command prefix and environment variables that put the launcher into the situation."""
    match situation:
        case Situation.FEW_FILES:
            return ("sh", "-c", 'ulimit -n 256; exec "$@"', "sh"), {}
        case Situation.NO_SHARED_MEMORY:
            return _mounted("-o size=4k", "/dev/shm"), {}
        case Situation.CLOCK_JUMPS:
            shim = directory / "shim"
            shim.mkdir()
            (shim / "sitecustomize.py").write_text(_JUMPING)
            return (), {"PYTHONPATH": os.pathsep.join(filter(None, [str(shim), os.environ.get("PYTHONPATH", "")]))}
        case _:
            return (), {}


def _mounted(options, place):
    """Return a command prefix that mounts a tiny file system at `place`, or nothing if mounting is forbidden."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        return ()
    fill = f"head -c 4096 /dev/zero > {place}/full 2>/dev/null"
    return ("unshare", "-m", "sh", "-c", f'mount -t tmpfs {options} none {place} && {{ {fill}; exec "$@"; }}', "sh")


# --- trouble ----------------------------------------------------------------------------------------------------------


def _nothing(run, seed, figures):
    _gets_on(run)


def _kills(run, seed, figures):
    draw = generator(seed, "bad machine")
    victims = [*ROLES, *draw.choice(ROLES, size=_KILLS - len(ROLES))]
    for victim in map(str, draw.permutation(victims)):
        time.sleep(float(draw.uniform(0.0, 0.3)))
        _signal(run, victim, signal.SIGKILL)
        figures["kills"] += 1
        _gets_on(run)


def _standstill(run, seed, figures):
    for role in ROLES:
        process = _signal(run, role, signal.SIGSTOP)
        time.sleep(_STANDS_STILL_S)
        with suppress(psutil.NoSuchProcess):
            process.resume()
        figures["standstills"] += 1
        _gets_on(run)


def _port_taken(run, seed, figures):
    for role in ("engine-0", "controller"):
        words = run.role(role).cmdline()
        port = int(words[words.index("--port") + 1])
        _signal(run, role, signal.SIGKILL)
        with closing(_bound(port)):
            time.sleep(4.0)
        figures["ports taken"] += 1
        _gets_on(run)


def _bound(port):
    deadline = time.monotonic() + 10.0
    while True:
        thief = socket.socket()
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            thief.bind(("127.0.0.1", port))
            thief.listen()
        except OSError:
            thief.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return thief


_TROUBLE: Final[Mapping[Situation, Callable[[LiveRun, int, Counter[str]], None]]] = {
    Situation.KILLS: _kills,
    Situation.STANDSTILL: _standstill,
    Situation.PORT_TAKEN: _port_taken,
}


def _signal(run, role, number):
    found: list[psutil.Process] = []

    def is_up(run):
        with suppress(AssertionError):
            found.append(run.role(role))
        return bool(found)

    run.until(is_up, f"{role} to be up", _WAIT_S)
    os.kill(found[-1].pid, number)
    return found[-1]


def _gets_on(run):
    steps = len(run.steps())
    run.until(lambda run: len(run.steps()) >= steps + 2, "two more steps", _WAIT_S)


# --- what must hold ---------------------------------------------------------------------------------------------------


def _closed(run):
    """Close the run's terminal (SIGHUP); return sentences about a wrong exit status and about processes that remain."""
    os.killpg(run.launcher.pid, signal.SIGHUP)
    status = run.end(_WAIT_S)
    return ([] if status == 130 else [f"a closed terminal ends a run with 130, not {status}"]) + _left(run)


def _settled(run):
    """Stop the run; return sentences about contradictions in its ledger and about processes that remain."""
    deadline = time.monotonic() + _WAIT_S
    while run.launcher.poll() is None:
        try:
            with controller_of(run.directory) as controller:
                controller.stop()
            break
        except UserError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    status = run.end(_WAIT_S)
    broken = _left(run) + ([] if status == 0 else [f"the run ended with {status}:\n{run.story()}"])
    return broken + (contradictions(run) if run.events("run_finished") else ["the event log has no end"])


def _left(run):
    return [] if run.is_gone() else [f"processes are left: {[' '.join(each.cmdline()) for each in run.alive()]}"]


def contradictions(run):
    """Return a sentence for each order that was trained twice, and for each contradiction of ledger and event log."""
    trained: dict[int, list[int]] = {}
    for event in run.events():
        if event["kind"] == "trainer_ready":  # a restarted trainer resumes its last checkpoint and loses later steps
            trained = {step: orders for step, orders in trained.items() if step <= event["model_version"]}
        elif event["kind"] == "step":
            trained[event["step"]] = event["orders"]
    times = Counter(order for orders in trained.values() for order in orders)
    broken = [f"order {order} was trained {count} times" for order, count in times.items() if count > 1]
    ledger = run.events("run_finished")[-1]["ledger"]
    broken += unbalanced(ledger)
    if ledger["trained"] != len(times):
        broken.append(f"the account has {ledger['trained']} orders trained, the steps {len(times)}")
    return broken


def _read_only(arguments, path):
    """Launch a run where nothing can be written; return its output unless that is one sentence of refusal."""
    through = _mounted("-o ro", str(path.parent))
    if not through:
        return []
    path.parent.mkdir(parents=True)
    with launched(arguments, path, through=through) as run:
        deadline = time.monotonic() + _WAIT_S
        while run.launcher.poll() is None and time.monotonic() < deadline:
            time.sleep(0.1)
        output, status = run.output, run.launcher.poll()
    sentences = [line for line in output.splitlines() if line.startswith("pipelinerl: ")]
    return (
        [] if (status, len(sentences)) == (2, 1) and "Traceback" not in output else [f"status {status}, and:\n{output}"]
    )
