"""A run on two hosts, each with its own supervisor, completes even if one host is killed and comes back."""

import os
import subprocess
from contextlib import contextmanager

import pytest

from pipelinerl.system.supervised_process import tied
from tests.fakes.live_run import CLI, endless_run, launched
from tests.fakes.two_hosts import two_hosts
from tests.patience import PATIENCE_S


@contextmanager
def _node(host, run_dir, log):
    words = tied([*host.enter, *CLI, "node", str(run_dir), "--name", "b"], "SIGTERM")
    with log.open("ab") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def _verified(run):
    """Return how often an engine on the second host has passed the check that it serves the trainer's weights."""
    return sum("//10.77.0.2:" in event["url"] for event in run.events("engine_verified"))


def _begun(run):
    return (run.directory / "cluster" / "launch.json").is_file()


@pytest.mark.slow
def test_killed_host_comes_back_and_serves_the_run_again(tmp_path):
    directory, log = tmp_path / "run", tmp_path / "b.out"
    changes = ("engine.count=2", "actor.count=2")
    with two_hosts() as (one, two):
        hosts = ["--node", f"a={one.address}", "--node", f"b={two.address}:roles=engine"]
        with launched([*endless_run(directory, *changes), *hosts], directory, through=one.enter) as run:
            run.until(_begun, "the launch")
            with _node(two, directory, log):
                run.until(lambda run: _verified(run) == 1, "an engine on the second host")
                run.until_step(4)
            reached = max(run.steps())
            with _node(two, directory, log) as node:
                run.until(lambda run: _verified(run) == 2, "an engine on the second host again")
                run.until_step(reached + 3)
                subprocess.run([*one.enter, *CLI, "stop", str(directory)], check=True, timeout=PATIENCE_S)
                assert run.end() == 0, run.story()
                assert node.wait(PATIENCE_S) == 0, log.read_text()
