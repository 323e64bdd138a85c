"""The process that sends metrics to a tracker never disturbs a run, and no metric value is lost or duplicated."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, final

import pytest

from pipelinerl import registry
from pipelinerl.commands.check import refuse
from pipelinerl.config.recipe import load, parse
from pipelinerl.errors import UserError
from pipelinerl.plugins.trackers.role import feed_until, track_run, trackers_of
from pipelinerl.plugins.trackers.section import TrackioSection, WandbSection
from pipelinerl.plugins.trackers.tracker import TrackedRun, TrackioTracker, WandbTracker
from tests.fakes import small_disk
from tests.patience import PATIENCE_S
from tests.plugins.trackers.event_files import series
from tests.plugins.watch.timeline.events_of_a_run import run

RUN: Final = TrackedRun(name="tiny", directory=Path("/runs/tiny"), recipe={"run": {"name": "tiny"}})


def test_tracker_whose_disk_was_full_logs_all_metrics_once_there_is_space(tmp_path):
    place = tmp_path / "disk"
    if reason := small_disk.why_not(place):
        pytest.skip(f"no small disk can be mounted here: {reason}")
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run(5)))
    command = [*small_disk.command(place, size="256k"), sys.executable, "-m", "tests.fakes.track_on_small_disk"]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == {"failed": True, "rewards": [[number, 0.5] for number in range(1, 6)]}


@final
class RecordedRun:
    """Fake of a run of the packages wandb and trackio; it records its arguments and the logged rows."""

    def __init__(self, **begun):
        self.begun, self.rows, self.finished = begun, list[tuple[int, dict[str, float]]](), False
        self.id = begun.get("id") or "made-up"
        self.axes = list[tuple[str, dict[str, Any]]]()

    def define_metric(self, name, **axis):
        self.axes.append((name, axis))

    def log(self, row, *, step):
        self.rows.append((step, dict(row)))

    def finish(self):
        self.finished = True


@final
class Package:
    """Fake of the packages wandb and trackio; `run` is the run that was opened last."""

    def __init__(self):
        self.run = RecordedRun()

    def init(self, **begun):
        self.run = RecordedRun(**begun)
        return self.run


@pytest.fixture
def package(monkeypatch):
    """Return a fake that is imported in place of wandb and trackio."""
    package = Package()
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, package)
    return package


WANDB, TRACKIO = WandbSection(project="p", mode="offline"), TrackioSection(project="p")


def test_wandb_tracker_continues_the_run_whose_id_is_in_its_bookmark_and_logs_no_step_twice(package):
    opened = partial(WandbTracker, WANDB, RUN)
    first = opened(None)
    assert package.run.begun == {
        "project": "p", "entity": None, "name": "tiny", "id": None, "resume": "allow", "mode": "offline",
        "dir": "/runs/tiny", "config": {"run": {"name": "tiny"}},
    }  # fmt: skip
    first.log(3, {"reward": 0.5}, time=7.0)
    first.rewind(2)
    first.log(2, {"reward": 0.25}, time=8.0)
    first.log(3, {"reward": 0.25}, time=9.0)
    assert package.run.rows == [(3, {"reward": 0.5, "time": 7.0})], "W&B would drop the one, and mix the other in"
    bookmark = first.flush()
    first.close()
    assert package.run.finished
    second = opened(json.loads(json.dumps(bookmark)))
    assert package.run.begun["id"] == "made-up"
    second.log(3, {"reward": 0.25}, time=9.0)
    second.log(4, {"reward": 0.75}, time=9.5)
    assert package.run.rows == [(4, {"reward": 0.75, "time": 9.5})]


def test_late_evaluation_is_logged_to_wandb_with_the_version_that_was_evaluated(package):
    made = WandbTracker(WANDB, RUN, None)
    assert ("eval/*", {"step_metric": "eval/version"}) in package.run.axes
    made.log(0, {"eval/held_out/accuracy": 0.25}, time=1.0)
    made.log(9, {"reward": 0.5}, time=7.0)
    made.log(5, {"eval/held_out/accuracy": 0.5}, time=8.0)
    assert package.run.rows[0] == (0, {"eval/held_out/accuracy": 0.25, "eval/version": 0.0})
    assert package.run.rows[2] == (9, {"eval/held_out/accuracy": 0.5, "eval/version": 5.0}), "of step 5 none is taken"


def test_trackio_tracker_continues_the_run_named_in_its_bookmark_and_logs_each_row_once(package):
    made = TrackioTracker(TRACKIO, RUN, None)
    assert package.run.begun == {
        "project": "p", "name": "tiny", "space_id": None, "resume": "never", "config": {"run": {"name": "tiny"}},
    }  # fmt: skip
    made.log(3, {"reward": 0.5}, time=7.0)
    made.log(2, {"eval/held_out/accuracy": 0.5, "eval/held_out/low": 0.25}, time=7.5)
    rows = [(3, {"reward": 0.5}), (2, {"eval/held_out/accuracy": 0.5, "eval/held_out/low": 0.25})]
    assert package.run.rows == rows, "an evaluation may be of a version that training has passed"
    bookmark = json.loads(json.dumps(made.flush()))
    made.close()
    assert package.run.finished
    again = TrackioTracker(TRACKIO, RUN, bookmark)
    assert package.run.begun["resume"] == "allow"
    for each in (again, again):  # the second pass logs the same steps again, like a run resumed from a checkpoint
        each.rewind(2)
        each.log(2, {"eval/held_out/accuracy": 0.25}, time=8.0)
        each.log(3, {"reward": 0.25}, time=8.0)
        each.log(4, {"reward": 0.75}, time=8.5)
        each.log(2, {"eval/other/accuracy": 0.25}, time=9.0)
    assert package.run.rows == [(4, {"reward": 0.75}), (2, {"eval/other/accuracy": 0.25})]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_unreachable_tracker_server_loses_no_metric(tmp_path, monkeypatch, package):
    """The server is unreachable at the start and fails again later; each step is logged when the server is back."""
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run(5)))
    stop, away, logged = threading.Event(), iter([True, False, False]), list[tuple[int, float]]()

    class Server:
        id = "made-up"

        def __init__(self, **_):
            if next(away):
                raise ConnectionError("no route to host")

        def define_metric(self, name, **_): ...

        def log(self, row, *, step):
            if step == 3 and len(logged) == 2:
                logged.append((-1, 0.0))
                raise ConnectionError("it went away")
            if "reward" in row:
                logged.append((step, row["reward"]))
            if step == 5:
                stop.set()

        def finish(self): ...

    monkeypatch.setitem(sys.modules, package, SimpleNamespace(init=Server))
    tracker = partial(WandbTracker, WANDB) if package == "wandb" else partial(TrackioTracker, TRACKIO)
    opened = partial(tracker, RUN)
    feed_until(tmp_path, package, opened, stop, first_retry_s=0.01)
    assert [each for each in logged if each[0] >= 3] == [(3, 0.5), (4, 0.5), (5, 0.5)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_passwords_are_removed_from_the_recipe_that_is_sent_to_a_tracker(name, package, monkeypatch, tmp_path):
    """Trackers upload the recipe to third-party servers; passwords in URLs are removed from every recipe key."""
    monkeypatch.setattr(registry, "missing_packages", lambda _: [])
    places = {"path": "https://u:hunter2@data.lab/x", "more": [{"at": "ftp://u:hunter2@host"}]}
    domain = {"name": "d", "source": "s", "parameters": places}
    config = parse({"model": {"path": "m"}, "domains": [domain], "trackers": {name: {"project": "p"}}})
    trackers_of(config, tmp_path)[name](None).close()
    begun = json.dumps(package.run.begun["config"])
    assert "hunter2" not in begun and "https://data.lab/x" in begun and "ftp://host" in begun


def test_missing_tracker_package_is_rejected_before_the_run(monkeypatch):
    monkeypatch.setattr(registry, "missing_packages", lambda each: [name for name in each.needs if name == "wandb"])
    config = load("tiny", ["trackers.wandb={project='p'}"])
    for refused in (lambda: refuse(config), lambda: trackers_of(config, Path("/runs/x"))):
        with pytest.raises(UserError, match=r"^trackers 'wandb' needs wandb, which is not installed; pip install"):
            refused()


def test_command_that_sends_a_finished_run_to_tensorboard_sends_each_step_only_once(tmp_path):
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in run(3)))
    board = tmp_path / "board"
    assert track_run(tmp_path, board) == f"{board}; view it with: tensorboard --logdir {board}"
    assert track_run(tmp_path, board).startswith("nothing new for ")
    assert series(board, "reward") == [(1, 0.5), (2, 0.5), (3, 0.5)]
    with pytest.raises(UserError, match="is not a run"):
        track_run(board, board)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be written: File exists"):
        track_run(tmp_path, tmp_path / "file")
