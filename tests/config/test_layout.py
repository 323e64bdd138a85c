"""Tests that commands and the controller reject a run directory of another layout version."""

import json

import pytest
from rich.console import Console

from launch.run_directory import create, open_run
from pipelinerl.commands.remote import controller_of
from pipelinerl.config.recipe import check_layout, load, save, write_layout
from pipelinerl.errors import UserError
from pipelinerl.messages import LAYOUT
from pipelinerl.plugins.replay.replayed_run import show
from pipelinerl.roles.resumed_run import directory_of


@pytest.fixture
def older(tmp_path):
    """Return the directory of a live run of layout 1; only later layouts have a file with the layout version."""
    save(load("tiny"), tmp_path / "recipe.toml")
    (tmp_path / "events.jsonl").write_text('{"kind": "run_started", "elapsed_s": 1.0}\n')
    (tmp_path / "controller.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": None}))
    return tmp_path


def test_resuming_changing_knobs_and_replaying_are_rejected_for_a_run_directory_of_an_older_layout(older):
    sentence = rf"^the run in {older} must be of layout {LAYOUT}, got layout 1: it was begun by another version"
    for ask in (open_run, controller_of, lambda path: directory_of(str(path))):
        with pytest.raises(UserError, match=sentence):
            ask(older)
    with pytest.raises(UserError, match=sentence):
        show(older, step=1, objective=None, console=Console())


def test_run_of_a_later_layout_is_rejected(older):
    (older / "layout").write_text("99\n")
    with pytest.raises(UserError, match="got layout 99"):
        check_layout(older)


def test_new_run_has_the_current_layout_and_an_empty_directory_is_accepted(tmp_path):
    check_layout(tmp_path)
    made = create(load("tiny", [f"run.directory={tmp_path}"]))
    assert open_run(made.path).path == made.path
    write_layout(tmp_path)
    assert (tmp_path / "layout").read_text() == f"{LAYOUT}\n"
