"""A run whose roles are on two machines that share only a network."""

import os
import subprocess
import time
from contextlib import contextmanager

import pytest

from pipelinerl.observability.events import read_events
from tests.fakes.bigram_recipe import bigram_recipe
from tests.fakes.live_run import CLI
from tests.fakes.two_hosts import two_hosts
from tests.patience import PATIENCE_S, SOON_S

TOKEN = {"PIPELINERL_TOKEN": "a secret of this test"}
SMALL = ("--set", "run.steps=5000", "--set", "evaluation.problems=16", "--set", "training.rollouts_per_step=64")


class Roles:
    """The roles' processes on both hosts; each host has a directory of its own."""

    def __init__(self, folder, controller):
        self.folder = folder
        self.recipe = bigram_recipe(folder / "bigram", walking=True)
        self.controller_url = f"http://{controller.address}:8000"
        self.processes = {}
        self.environment = {**os.environ, **TOKEN, "OMP_NUM_THREADS": "1"}

    def start(self, host, role, *arguments, name=""):
        name, directory = name or role, self.folder / host.address
        directory.mkdir(exist_ok=True)
        words = [*host.enter, *CLI, role, "--run-dir", str(directory), "--controller-url", self.controller_url]
        words += ["--recipe", str(self.recipe), "--name", name, *arguments, *SMALL]
        with (self.folder / f"{name}.log").open("ab") as log:
            started = subprocess.Popen(words, env=self.environment, stdout=log, stderr=log, cwd=directory)
        self.processes[name] = started

    def command(self, host, *words):
        command, output = [*host.enter, *CLI, *words], {"capture_output": True, "text": True}
        done = subprocess.run(command, env=self.environment, **output, timeout=PATIENCE_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def until(self, reached, what):
        deadline = time.monotonic() + PATIENCE_S
        while not reached():
            story = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in self.folder.glob("*.log"))
            assert time.monotonic() < deadline, f"{what} did not come:\n{story}"
            time.sleep(0.05)


@contextmanager
def roles(folder, controller):
    made = Roles(folder, controller)
    try:
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
        for process in made.processes.values():
            process.wait(SOON_S)


@pytest.mark.slow  # tests/launch/cluster/test_nodes.py tests this faster, with a launcher for several hosts
@pytest.mark.parametrize("transport", ["broadcast", "pull"])
def test_run_works_with_roles_on_two_hosts(tmp_path, transport):
    """The second host runs one engine and all actors; everything else runs on the first."""
    with two_hosts() as (one, two), roles(tmp_path, one) as run:

        def events(kind):
            path = tmp_path / one.address / "events.jsonl"
            return [event for event in (read_events(path) if path.is_file() else []) if event["kind"] == kind]

        def step():
            return max((event["step"] for event in events("step")), default=0)

        run.start(one, "redis", "--host", one.address)
        password = tmp_path / one.address / "redis" / "password"
        run.until(password.is_file, "the password of the streams")
        run.environment["PIPELINERL_REDIS_URL"] = f"redis://:{password.read_text()}@{one.address}:6379/0"
        run.start(one, "controller", "--host", one.address)
        weights = ["--set", f"weights.transport={transport}"]
        if transport == "pull":
            run.start(one, "parameter-server", "--host", one.address, "--port", "8100")
            weights += ["--set", f'parameter_server.urls=["http://{one.address}:8100"]']
        run.start(one, "trainer", *weights)
        run.start(two, "actor")
        run.start(two, "engine", "--host", two.address, "--port", "8001", name="engine-0")
        run.start(two, "engine", "--port", "8002", name="hidden")
        assert run.processes["hidden"].wait(PATIENCE_S) == 2
        hint = f"where other machines cannot reach it; start it with --host {two.address}"
        assert hint in (tmp_path / "hidden.log").read_text()
        run.start(one, "engine", "--host", "0.0.0.0", "--port", "8001", name="engine-1")
        run.until(lambda: any(event["engines"] == 2 for event in events("publish")), "a publication to both")
        reached = step()
        run.until(lambda: step() >= reached + 10, "ten steps more")
        rows = [line.split()[:3] for line in run.command(two, "engines", "list", run.controller_url).splitlines()[1:-1]]
        assert sorted(rows) == [["engine-0", "bigram", "healthy"], ["engine-1", "bigram", "healthy"]]
        assert {event["url"] for event in events("engine_verified")} == {f"http://{h.address}:8001" for h in (one, two)}
        run.command(two, "stop", run.controller_url)
        assert run.processes["controller"].wait(PATIENCE_S) == 0
        assert run.processes["trainer"].wait(PATIENCE_S) == 0
        assert events("run_finished")
