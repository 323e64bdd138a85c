"""Tests of `pipelinerl top` with a live controller, with only the files of a run, and on a real terminal."""

import asyncio
import json
import os
import pty
import subprocess
import sys
import termios
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec

import pytest

from pipelinerl.errors import UserError
from pipelinerl.plugins.watch.command_line import top
from pipelinerl.plugins.watch.top.run_follower import RunFollower
from tests.controller.world import ENGINE
from tests.patience import PATIENCE_S
from tests.plugins.watch.run_files import served_controller, written_run

pytestmark = pytest.mark.skipif(find_spec("textual") is None, reason="pipelinerl top is not tried: textual is not here")


@contextmanager
def followed(run):
    follower = RunFollower(str(run))
    try:
        yield follower
    finally:
        follower.close(timeout_s=PATIENCE_S)


@asynccontextmanager
async def shown(run, size=(80, 24)):
    """Yield the screen of a run once it shows the metrics of that run."""
    from pipelinerl.plugins.watch.top.textual_app import TopApp

    with followed(run) as follower:
        app = TopApp(follower)
        async with app.run_test(size=size) as pilot:
            await until(pilot, lambda: "version" in text(pilot, "#figures-text"))
            yield pilot


async def until(pilot, reached):
    async with asyncio.timeout(PATIENCE_S):
        while not reached():
            await pilot.pause(0.02)


def text(pilot, selector):
    from textual.widgets import Static

    return str(pilot.app.query_one(selector, Static).render())


def values(pilot):
    from textual.widgets import Static

    from pipelinerl.plugins.watch.top.textual_app import KnobRow

    return {row.knob: str(row.query_one(".value", Static).render()) for row in pilot.app.query(KnobRow)}


@pytest.fixture
def run_dir(tmp_path):
    (tmp_path / "controller").mkdir()
    return written_run(tmp_path / "run", steps=3, end=False)


@pytest.mark.parametrize("size", [(80, 24), (40, 24)])
async def test_knob_can_be_edited_in_top_and_an_invalid_value_shows_an_error(tmp_path, run_dir, size):
    async with served_controller(run_dir, tmp_path / "controller") as (run, _), shown(run_dir, size) as pilot:
        assert "live" in text(pilot, "#figures-text") and ENGINE.removeprefix("http://") in text(pilot, "#figures-text")
        knobs = run.controller.state.knobs
        assert values(pilot)["k"] == "4" and values(pilot)["domain_weights.b"] == "2"
        await pilot.press("down", "enter", "6", "enter")
        await until(pilot, lambda: values(pilot)["k"] == "6")
        assert run.controller.state.knobs.k == 6.0
        await until(pilot, lambda: text(pilot, "#message") == "k = 6, effective at the next step boundary")
        await pilot.press("down", "enter", *"-1", "enter")
        await until(pilot, lambda: "temperature must be" in text(pilot, "#message"))
        assert pilot.app.query_one("#message").has_class("refused")
        await pilot.press("enter", *"0.5", "escape")
        assert run.controller.state.knobs.temperature == knobs.temperature, "Escape sends no change"
        assert values(pilot)["temperature"] == "1"
        await pilot.press("enter", "q", "escape")
        assert pilot.app.is_running, "a letter typed into a field is not a command"


async def test_top_shows_a_finished_run_from_its_files_and_allows_no_changes(finished_run):
    async with shown(finished_run, (40, 24)) as pilot:
        output = text(pilot, "#figures-text")
        assert "tiny finished" in output and "12/12" in output and "short_words" in output and "lost" in output
        assert values(pilot)["staleness.k"] == "16", "the value of the last change"
        await pilot.press("enter")
        assert "the run is over" in text(pilot, "#message")
        from textual.widgets import Input

        assert not any(field.display for field in pilot.app.query(Input))


async def test_top_reports_a_silent_controller_and_keeps_showing_its_last_metrics(tmp_path, run_dir, monkeypatch):
    monkeypatch.setenv("PIPELINERL_TOKEN", "secret")
    async with served_controller(run_dir, tmp_path / "controller") as (_, end):
        address = json.loads((run_dir / "controller.json").read_text())["url"]
        async with shown(address) as pilot:
            assert "test live" in text(pilot, "#figures-text") and values(pilot)["k"] == "4"
            end()
            await until(pilot, lambda: "test silent" in text(pilot, "#figures-text"))
            assert "does not answer" in text(pilot, "#message") and values(pilot)["k"] == "4"
            await pilot.press("enter")
            assert pilot.app.query_one("#message").has_class("refused")


def test_leaving_top_with_q_restores_the_terminal(finished_run):
    ours, theirs = pty.openpty()
    try:
        before = termios.tcgetattr(ours)
        command = [sys.executable, "-m", "pipelinerl.cli", "top", str(finished_run)]
        environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}
        with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
            os.close(theirs)
            output = read_until(ours, b"finished")
            os.write(ours, b"q")
            output += read_until(ours, None)
            assert process.wait(PATIENCE_S) == 0, output
        assert termios.tcgetattr(ours) == before
    finally:
        os.close(ours)
    assert output.rindex(b"\x1b[?25h") > output.rindex(b"\x1b[?25l"), "the cursor is visible again"
    assert output.count(b"\x1b[?1049h") == output.count(b"\x1b[?1049l") == 1
    assert b"Traceback" not in output and b"\x1b[?1003h" not in output, "the terminal keeps the mouse"


def read_until(terminal, wanted):
    """Read from the terminal until it has written `wanted`, or until the program has closed its side."""
    output = b""
    while wanted is None or wanted not in output:
        try:
            output += os.read(terminal, 2**16)
        except OSError:  # raised when the program has closed its side of the terminal
            assert wanted is None, f"it ended without printing {wanted!r}: {output!r}"
            break
    return output


def test_top_without_a_terminal_or_a_run_is_rejected_in_one_sentence(tmp_path, finished_run):
    with pytest.raises(UserError, match="try pipelinerl status"):
        top(str(finished_run))
    with pytest.raises(UserError, match="is not a run"):
        RunFollower(str(tmp_path))
