"""A run on two hosts, each with a supervisor of its own; one is killed in the middle, comes back, and the run ends."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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


def _hosts(one: Host, two: Host, more: str = "") -> list[str]:
    return ["--host", f"a={one.address}{more}", "--host", f"b={two.address}"]


def _engines(run: LiveRun) -> int:
    return max((event["engines"] for event in run.events("publish")[-1:]), default=0)


def test_a_host_that_is_killed_comes_back_and_the_run_ends(tmp_path: Path) -> None:
    directory, log = tmp_path / "run", tmp_path / "b.out"
    changes = ("run.steps=100000", "engine.count=2", "actor.count=2")
    with two_hosts() as (one, two):
        arguments = [*light_run(directory, *changes), *_hosts(one, two)]
        with launched(arguments, directory, through=one.enter) as run:
            run.until(lambda run: (directory / "cluster" / "launch.json").is_file(), "the launch")
            with _node(two, directory, log):
                run.until(lambda run: _engines(run) == 2, "a publication to both hosts")
            reached = max(run.steps(), default=0)
            run.until_step(reached + 3)
            assert run.launcher.poll() is None
            with _node(two, directory, log) as node:
                again = len(run.events("publish"))
                run.until(
                    lambda run: any(event["engines"] == 2 for event in run.events("publish")[again + 1 :]),
                    "a publication to both hosts again",
                )
                subprocess.run([*one.enter, *CLI, "stop", str(directory)], check=True, timeout=PATIENCE_S)
                assert run.end() == 0, run.story()
                assert node.wait(PATIENCE_S) == 0, log.read_text()
        assert "completed" in run.output and "host b is up" in run.output
