"""A run on two hosts, each with a supervisor of its own; one is killed in the middle, comes back, and the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pipelinerl.system import tied_process
from tests.fakes.live_run import CLI, LiveRun, launched, light_run
from tests.fakes.two_hosts import Host, two_hosts
from tests.patience import PATIENCE_S

_TIE = (sys.executable, "-S", "-E", tied_process.__file__, str(os.getpid()), "SIGTERM", "", "--")


@contextmanager
def _node(host: Host, run_dir: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`pipelinerl node` on a host; killed with the block, if it lives."""
    words = [*_TIE, *host.enter, *CLI, "node", str(run_dir), "--name", "b"]
    with log.open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def _verified(run: LiveRun) -> int:
    """How often an engine of the second host was found to compute what the trainer does."""
    return sum("//10.77.0.2:" in event["url"] for event in run.events("engine_verified"))


@pytest.mark.parametrize(
    "roles",
    ["engine", pytest.param("engine+actor", marks=pytest.mark.slow), pytest.param("trainer", marks=pytest.mark.slow)],
)
def test_a_host_that_is_killed_comes_back_and_the_run_ends(tmp_path: Path, roles: str) -> None:
    directory, log = tmp_path / "run", tmp_path / "b.out"
    changes = ("run.steps=100000", "engine.count=2", "actor.count=2", "checkpoint.interval_steps=2")
    trains = roles == "trainer"
    with two_hosts() as (one, two):
        hosts = ["--host", f"a={one.address}", "--host", f"b={two.address}:roles={roles}"]
        hosts[1] += ":roles=engine+actor" if trains else ""
        with launched([*light_run(directory, *changes), *hosts], directory, through=one.enter) as run:
            run.until(lambda run: (directory / "cluster" / "launch.json").is_file(), "the launch")
            with _node(two, directory, log):
                run.until(lambda run: trains or _verified(run) == 1, "an engine on the second host")
                run.until_step(4)
            reached = max(run.steps())
            if not trains:
                run.until_step(reached + 3)
            with _node(two, directory, log) as node:
                run.until(lambda run: trains or _verified(run) == 2, "an engine on the second host again")
                run.until_step(reached + 3)
                subprocess.run([*one.enter, *CLI, "stop", str(directory)], check=True, timeout=PATIENCE_S)
                assert run.end() == 0, run.story()
                assert node.wait(PATIENCE_S) == 0, log.read_text()
        assert "completed" in run.output and "host b is up" in run.output
        assert not trains or len(run.events("trainer_ready")) == 2
