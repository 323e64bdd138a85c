"""A run that another version of the project began is refused with a sentence, by whoever would read its streams."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from launch.run_directory import create, open_run
from pipelinerl.commands.remote import controller_of
from pipelinerl.commands.replay import show
from pipelinerl.config.recipe import check_layout, load, save, write_layout
from pipelinerl.errors import UserError
from pipelinerl.messages import LAYOUT
from pipelinerl.roles import controller_role
from pipelinerl.roles.controller_role import Start
from pipelinerl.roles.process import Identity
from pipelinerl.roles.resumption import directory_of


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """A run as the first layout left it: with a recipe, events and a live controller's address, and no number."""
    save(load("tiny"), tmp_path / "recipe.toml")
    (tmp_path / "events.jsonl").write_text('{"kind": "run_started", "elapsed_s": 1.0}\n')
    (tmp_path / "controller.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": None}))
    return tmp_path


def test_whoever_would_go_on_with_it_ask_it_or_replay_it_says_so(older: Path) -> None:
    sentence = rf"^the run in {older} must be of layout {LAYOUT}, got layout 1: another version of pipelinerl began it"
    for ask in (open_run, controller_of, lambda path: directory_of(str(path))):
        with pytest.raises(UserError, match=sentence):
            ask(older)
    with pytest.raises(UserError, match=sentence):
        show(older, step=1, objective=None, console=Console())


async def test_a_controller_does_not_go_on_with_it(older: Path) -> None:
    identity = Identity(
        config=load("tiny"), run_dir=older, name="controller", redis_url="", controller_url="", token=None
    )
    with pytest.raises(UserError, match="got layout 1"):
        await controller_role.run(identity, start=Start.AFRESH)


def test_one_of_a_later_layout_is_refused_too(older: Path) -> None:
    (older / "layout").write_text("99\n")
    with pytest.raises(UserError, match="got layout 99"):
        check_layout(older)


def test_a_run_that_begins_now_is_of_this_layout_and_so_is_a_directory_that_holds_none(tmp_path: Path) -> None:
    check_layout(tmp_path)
    made = create(load("tiny", [f"run.directory={tmp_path}"]))
    assert open_run(made.path).path == made.path
    write_layout(tmp_path)
    assert (tmp_path / "layout").read_text() == f"{LAYOUT}\n"
