"""`LiveRun`: a real `pipelinerl run` in separate processes, observed through its event log.

Every wait has a deadline, and a failure shows the output of launcher and roles. After the `with` block no
process of the run is alive, even if this process is killed.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import final

import psutil
from typer.testing import CliRunner

from pipelinerl import cli
from pipelinerl.observability.events import Event, EventFollower
from pipelinerl.system.supervised_process import tied
from tests.fakes.bigram_recipe import bigram_recipe
from tests.patience import PATIENCE_S

#: Overrides for short runs of the shipped model, in which each step takes about a tenth of a second.
SMALL = (
    "evaluation.problems=16",
    "evaluation.interval_steps=1000",
    "checkpoint.interval_steps=10",
    "training.rollouts_per_step=64",
)
_NOTE_EVERY_S = 0.5
CLI = (sys.executable, "-m", "pipelinerl.cli")


@final
class LiveRun:
    """A launcher and its processes, as `launched` starts them. If `launcher` is None, the run has ended."""

    launcher: subprocess.Popen[str]

    def __init__(self, launcher, directory, output):
        if launcher is not None:
            self.launcher = launcher
        self.directory = directory
        self._output = output
        self.seen: dict[int, psutil.Process] = {}
        self._follower = EventFollower(directory / "events.jsonl")
        self._events: list[Event] = []
        self._noted_at = 0.0

    @property
    def output(self):
        return self._output.read_text()

    def events(self, kind=None):
        self._events += self._follower.all()
        return [event for event in self._events if kind is None or event["kind"] == kind]

    def steps(self):
        return [event["step"] for event in self.events("step")]

    def note_processes(self):
        """Record the current child processes of the launcher; return all processes recorded so far."""
        self._noted_at = time.monotonic()
        with suppress(psutil.NoSuchProcess):
            self.seen |= {p.pid: p for p in psutil.Process(self.launcher.pid).children(recursive=True)}
        return self.seen

    def alive(self):
        return [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def _note_now_and_then(self):
        if time.monotonic() - self._noted_at > _NOTE_EVERY_S:
            self.note_processes()

    def is_gone(self):
        """Wait until every recorded process has ended; return false if one is still alive at the deadline."""
        deadline = time.monotonic() + PATIENCE_S
        while self.alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        return not self.alive()

    def role(self, name):
        """Return the process of a role. The role `redis` is found by the command line of its server."""
        for process in self.note_processes().values():
            try:
                line = process.cmdline()
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
            server = name == "redis" and "-server " in " ".join(line) + " "
            if server or ("--name" in line and line[line.index("--name") + 1] == name):
                return process
        raise AssertionError(f"{name} is not running; the launcher printed:\n{self.output}")

    def until(self, reached, what, timeout_s=PATIENCE_S):
        """Wait until `reached` returns true; fail if the run ends earlier."""
        deadline = time.monotonic() + timeout_s
        while not reached(self):
            self._note_now_and_then()
            if self.launcher.poll() is not None:
                raise AssertionError(f"the run ended before {what}:\n{self.story()}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{what} did not come within {timeout_s:g} s:\n{self.story()}")
            time.sleep(0.05)

    def until_step(self, step, timeout_s=PATIENCE_S):
        self.until(lambda run: max(run.steps(), default=0) >= step, f"step {step}", timeout_s)

    def end(self, timeout_s=PATIENCE_S):
        deadline = time.monotonic() + timeout_s
        while self.launcher.poll() is None:
            self._note_now_and_then()
            if time.monotonic() > deadline:
                raise AssertionError(f"the run did not end within {timeout_s:g} s:\n{self.story()}")
            time.sleep(0.05)
        return self.launcher.returncode

    def story(self):
        """Return the output of launcher and roles, to explain a failure."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        tails = [f"--- {log.name}\n" + "\n".join(log.read_text().splitlines()[-15:]) for log in logs]
        last = "\n".join(str(event) for event in self.events()[-8:])
        return "\n".join([self.output, *tails, "--- events", last])


@contextmanager
def launched(arguments, directory, *, through=(), environment=MappingProxyType({}), working_directory=None):
    """Run `pipelinerl run <arguments>`, which writes to `directory`; `through` is a command prefix."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    output = directory.parent / f"{directory.name}-{time.monotonic_ns()}.out"
    environment = {**os.environ, "COLUMNS": "200", "PYTHONUNBUFFERED": "1", **environment}
    with output.open("w") as file:
        launcher = subprocess.Popen(
            tied([*through, *CLI, "run", *arguments], "SIGTERM"),
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=working_directory,
            start_new_session=True,
        )
    run = LiveRun(launcher, directory, output)
    try:
        yield run
    finally:
        run.note_processes()
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
            launcher.wait()
        for process in run.alive():
            process.kill()


def new_run(directory, *overrides, recipe="tiny"):
    return [str(recipe), *SMALL, f"run.directory={directory.parent}", f"run.name={directory.name}", *overrides]


def light_run(directory, *overrides, walking=False):
    """Return the arguments of a new small run with a bigram model, which is created next to `directory`."""
    return new_run(directory, *overrides, recipe=bigram_recipe(directory.parent / "bigram", walking=walking))


def endless_run(directory, *overrides):
    """Return the arguments of a light run that continues, slowly, until it is stopped."""
    return light_run(directory, "run.steps=100000", *overrides, walking=True)


def resumed(directory):
    return ["--resume", str(directory)]


def output_of(*arguments):
    done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout
