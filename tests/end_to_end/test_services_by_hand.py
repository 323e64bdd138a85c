"""Services started one by one, without a launcher, and adopted: each that is killed comes back."""

import subprocess
import time
from contextlib import ExitStack, contextmanager

import pytest

from pipelinerl.commands.remote import controller_of
from pipelinerl.errors import UserError
from pipelinerl.system.machine import free_ports
from pipelinerl.system.supervised_process import tied
from tests.fakes.bigram_recipe import bigram_recipe
from tests.fakes.live_run import CLI
from tests.patience import PATIENCE_S, wait_until


@contextmanager
def started(arguments, log):
    """Start a role; yield its process, which ends with this process."""
    with log.open("w") as file:
        process = subprocess.Popen(tied([*CLI, *arguments], "SIGTERM"), stdout=file, stderr=file, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@contextmanager
def services(folder):
    """Start every role of a run; yield its directory and the processes by role."""
    recipe, directory = bigram_recipe(folder / "bigram", walking=True), folder / "run"
    ports = dict(zip(("redis", "controller", "engine"), free_ports(3), strict=True))
    common = [
        *("--recipe", str(recipe), "--run-dir", str(directory), "--set", "run.steps=100000"),
        *("--controller-url", f"http://127.0.0.1:{ports['controller']}"),
        *("--redis-url", f"redis://127.0.0.1:{ports['redis']}/0"),
    ]
    roles = {}
    with ExitStack() as stack:
        for role in ("redis", "controller", "engine", "actor", "trainer"):
            listens = ["--port", str(ports[role])] if role in ports else []
            roles[role] = stack.enter_context(started([role, *common, *listens], folder / f"{role}.log"))
        yield directory, roles


def step_after(directory, step):
    """Wait until the run is past this step; return its step."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        try:
            with controller_of(directory) as controller:
                if (now := controller.status().step) > step:
                    return now
        except UserError:
            pass
        time.sleep(0.1)
    logs = "\n".join(f"--- {log.name}\n{log.read_text()[-1500:]}" for log in directory.parent.glob("*.log"))
    raise AssertionError(f"not reached within {PATIENCE_S:g} s:\n{logs}")


@pytest.mark.slow  # tests/launch/test_adoption.py tests this faster, with a role that only sleeps
@pytest.mark.timeout(600)
def test_adopted_services_come_back_after_they_are_killed_and_the_run_goes_on(tmp_path):
    with ExitStack() as stack:
        directory, roles = stack.enter_context(services(tmp_path))
        step = step_after(directory, 2)
        adopted = tmp_path / "adopt.log"
        stack.enter_context(started(["adopt", str(directory)], adopted))
        wait_until(lambda: adopted.read_text().count("watching") == len(roles), "all roles are watched")
        for role, process in roles.items():
            process.kill()
            name = {"engine": "engine-0", "actor": "actor-0"}.get(role, role)
            wait_until(lambda name=name: f"{name} died; restarting it" in adopted.read_text(), f"{name} is restarted")
            step = step_after(directory, step + 2)
            print(f"{role} is back: step {step}")
        assert "continues without" not in adopted.read_text()
