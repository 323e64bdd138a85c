"""`pipelinerl adopt`: it restarts roles that were started by hand and killed, and leaves alone those that ended."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from launch.adoption import adopt
from pipelinerl.config.recipe import load, save, write_layout
from pipelinerl.errors import UserError
from pipelinerl.system.process_record import FOLDER, read_records, recorded
from tests.fakes.live_run import CLI
from tests.patience import PATIENCE_S, is_running, wait_until

#: A role that lives until it is killed; it writes its arguments, a variable and its directory when it starts.
_ROLE = """
import json, os, sys, time
from pathlib import Path
from pipelinerl.system.process_record import recorded
with recorded(Path(sys.argv[1]), "engine", "engine-0"):
    with open(Path(sys.argv[1]) / "starts", "a") as starts:
        starts.write(json.dumps([os.getpid(), sys.argv[2], os.environ.get("COLOUR"), os.environ.get("LAUNCHER"),
                                 os.getcwd()]) + "\\n")
    time.sleep(600)
"""


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    write_layout(path)
    save(load("tiny"), path / "recipe.toml")
    return path


@contextmanager
def process(command, **options):
    started = subprocess.Popen(command, text=True, **options)
    try:
        yield started
    finally:
        started.kill()
        started.wait()
        if started.stdin is not None:
            started.stdin.close()


def starts(run_dir):
    path = run_dir / "starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_killed_role_is_restarted_with_its_arguments_environment_and_directory(run_dir, tmp_path):
    role_environment = {**os.environ, "COLOUR": "teal", "PYTHONPATH": str(Path.cwd())}
    (tmp_path / "elsewhere").mkdir()
    with ExitStack() as stack:
        role = stack.enter_context(
            process(
                [sys.executable, "-c", _ROLE, str(run_dir), "an argument"],
                env=role_environment,
                cwd=tmp_path / "elsewhere",
            )
        )
        wait_until(lambda: starts(run_dir), "the role has started")
        assert "COLOUR" not in (run_dir / FOLDER / "engine-0.json").read_text(), "the environment may hold secrets"
        output = tmp_path / "adopt.out"
        with output.open("w") as file:
            watching = stack.enter_context(
                process([*CLI, "adopt", str(run_dir)], stdout=file, stderr=file, env={**os.environ, "LAUNCHER": "only"})
            )
        wait_until(lambda: "watching engine-0" in output.read_text(), "adopt watches the role")
        role.kill()
        wait_until(lambda: len(starts(run_dir)) == 2, "the role is back")
        (_, *before), (revived, *after) = starts(run_dir)
        assert before == after == ["an argument", "teal", None, str(tmp_path / "elsewhere")]
        assert isinstance(revived, int)
        os.kill(revived, signal.SIGKILL)
        wait_until(lambda: len(starts(run_dir)) == 3, "the role is back again")
        assert "restarting it in 0.5 s (1 of 3)" in output.read_text() and "(2 of 3)" in output.read_text()
        assert [each["name"] for each in json.loads((run_dir / "restarts.json").read_text())["processes"]] == [
            "engine-0"
        ]
        watching.send_signal(signal.SIGTERM)
        assert watching.wait(PATIENCE_S) == 130
        last = starts(run_dir)[-1][0]
        assert isinstance(last, int) and not is_running(last), "adopt stops what it has restarted"


def test_role_that_ends_by_itself_is_not_restarted(run_dir):
    for status, is_kept in ((None, False), (0, False), (2, False), (143, False), (1, True)):
        try:
            with recorded(run_dir, "engine", "engine-0"):
                assert list(read_records(run_dir)) == ["engine-0"]
                assert read_records(run_dir)["engine-0"].is_alive
                if status is not None:
                    raise SystemExit(status)
        except SystemExit:
            pass
        assert (list(read_records(run_dir)) == ["engine-0"]) is is_kept, status


def test_adopt_ends_when_the_controller_has_recorded_the_end_of_the_run(run_dir):
    role = "import sys; from pathlib import Path; from pipelinerl.system.process_record import recorded\n"
    role += 'with recorded(Path(sys.argv[1]), "controller", "controller"): sys.stdin.read()'
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with process([sys.executable, "-c", role, str(run_dir)], stdin=subprocess.PIPE, env=environment) as controller:
        wait_until(lambda: read_records(run_dir), "the controller is recorded")
        said = []

        def announce(text):
            said.append(text)
            if text.startswith("watching"):
                event = {"kind": "run_finished", "time": time.time(), "reason": "12 steps"}
                (run_dir / "events.jsonl").write_text(json.dumps(event) + "\n")
                assert controller.stdin is not None
                controller.stdin.close()

        assert adopt(run_dir, announce=announce) == 0
        assert said[1:] == ["controller has ended", "completed: 12 steps"]


def test_adopt_is_rejected_without_live_roles_or_where_a_launcher_runs(run_dir, tmp_path):
    with pytest.raises(UserError, match=r"no run yet: recipe\.toml is missing; start its controller first"):
        adopt(tmp_path)
    holder = (
        f"from pathlib import Path; from launch.run_directory import held\nwith held(Path({str(run_dir)!r})): input()"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    with process([sys.executable, "-c", holder], stdin=subprocess.PIPE, env=environment) as launcher:
        lock = run_dir / ".lock"
        wait_until(lambda: lock.exists() and lock.read_text() == str(launcher.pid), "the lock is held")
        with pytest.raises(UserError, match=f"is being run by process {launcher.pid}"):
            adopt(run_dir)
    with pytest.raises(UserError, match=r"no role of .* runs on this machine; start its roles first"):
        adopt(run_dir)
