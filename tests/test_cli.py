"""The command line as people use it: exit status, stdout or stderr, and never a traceback.

Commands run inside the test's process; commands that would start processes are rejected before they do so.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.main import get_command

from launch.run_directory import create
from pipelinerl import cli, registry
from pipelinerl.config.recipe import load
from pipelinerl.plugins import conformance
from pipelinerl.roles import process
from pipelinerl.roles.dtypes import settled
from pipelinerl.roles.process import TOKEN_VARIABLE
from pipelinerl.roles.role import LOCAL_REDIS, REDIS_VARIABLE
from pipelinerl.system.http_service import listen
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
#: What users read who give a wrong recipe or argument; `…` stands for any text. After a change of wording,
#: `PIPELINERL_WRITE_GOLDEN=1 pytest -n 0 tests/test_cli.py` rewrites the blocks that differ; read the difference.
REFUSALS = Path(__file__).with_name("golden") / "refusals.txt"
WRITES_GOLDEN = "PIPELINERL_WRITE_GOLDEN" in os.environ


class Done(NamedTuple):
    """The result of a command: its exit status, and its output on stdout and stderr."""

    status: int
    out: str
    err: str


@pytest.fixture
def pipelinerl(monkeypatch, capsys, tmp_path):
    """Return a function that runs the command line `pipelinerl …` in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv(TOKEN_VARIABLE, "token")  # otherwise commands such as `actor` would create a token

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["pipelinerl", *map(str, arguments)])
        try:
            cli.main()
            status = 0
        except SystemExit as ended:
            status = int(ended.code or 0)
        output = capsys.readouterr()
        return Done(status, output.out, output.err)

    yield run
    assert list(tmp_path.glob("runs")) == [], "nothing was started"


def refusals():
    """Return the blocks of the golden file: `$ pipelinerl WORDS`, and the lines that it prints on stderr."""
    return REFUSALS.read_text().strip().split("\n\n")


@pytest.mark.parametrize("block", [pytest.param(each, id=each.splitlines()[0][13:]) for each in refusals()])
def test_user_error_exits_with_status_2_and_the_golden_sentence_on_stderr(pipelinerl, block, tmp_path):
    command, _, sentence = block.partition("\n")
    done = pipelinerl(*shlex.split(command.removeprefix("$ pipelinerl ")))
    printed = done.err.rstrip("\n").replace(str(ROOT), "CHECKOUT").replace(str(tmp_path), "HERE")
    assert done.status == 2 and printed.startswith("pipelinerl: ") and "Traceback" not in printed
    assert "evaluation.problems=4" in command or done.out == "", "a fault of the recipe alone is found at once"
    if re.fullmatch(".*".join(map(re.escape, sentence.split("…"))), printed):
        return
    if WRITES_GOLDEN:
        REFUSALS.write_text(REFUSALS.read_text().replace(block + "\n", f"{command}\n{printed}\n", 1))
        return
    assert printed == sentence


@pytest.mark.parametrize("arguments", ["--version", "-h", "run -h", "train -h", "sandbox probe -h", "oubliette run -h"])
def test_common_options_and_aliases_work(pipelinerl, arguments):
    done = pipelinerl(*arguments.split())
    assert done.err == "" and done.status == 0 and (version("pipelinerl") in done.out or "Usage" in done.out)


@pytest.mark.parametrize(
    ("plugin", "command"), [("replay", "explain"), ("oubliette", "sandbox"), ("trackers", "tracker")]
)
def test_command_of_a_missing_plugin_is_not_listed_and_names_the_plugin(pipelinerl, monkeypatch, plugin, command):
    assert f" {command} " in pipelinerl("-h").out
    monkeypatch.setitem(sys.modules, f"pipelinerl.plugins.{plugin}", None)
    assert f" {command} " not in pipelinerl("-h").out
    done = pipelinerl(command)
    assert done.status == 2 and f"{command} is in the plug-in pipelinerl.plugins.{plugin}, which" in done.err


def test_listing_the_commands_imports_none_of_a_plugin(pipelinerl, monkeypatch):
    modules = {each.build.partition(":")[0] for each in registry.COMMANDS.values()}
    for module in modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert " simulate " in pipelinerl("-h").out
    assert not modules & {*sys.modules}


def test_memory_and_disk_are_reported_as_not_predicted_without_their_plugin(monkeypatch):
    config = load("tiny", ["trainer.micro_batch_tokens=auto"])
    assert {need.part for need in cli._needs(config, {})} == {"memory", "disk"}
    monkeypatch.setitem(sys.modules, "pipelinerl.plugins.memory", None)
    (need,) = cli._needs(config, {})
    assert need.text.startswith("not predicted: ") and not need.lacking
    assert settled(config).trainer == config.changed("trainer", precision="fp32").trainer


def test_developer_commands_are_listed_in_a_checkout_only(pipelinerl, monkeypatch, tmp_path):
    assert " bench " in pipelinerl("-h").out
    package = tmp_path / "pipelinerl" / "plugins" / "conformance"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(Path(conformance.__file__).read_text())
    assert runpy.run_path(str(package / "__init__.py"))["BENCH"].hidden


def test_invalid_data_file_is_rejected_before_a_run_starts_or_resumes(pipelinerl, tmp_path):
    rows, recipe = tmp_path / "rows.jsonl", tmp_path / "my.toml"
    rows.write_text('{"prompt": "a", "answer": "1"}\n')
    table = '[[domains]]\nname = "d"\nsource = "files"\nparameters = { path = "rows.jsonl" }\n'
    recipe.write_text(f'base = "tiny"\n{table}')
    begun = str(create(load(str(recipe), [f"run.directory={tmp_path}"])).path)
    rows.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
    node = ("--name", "a", "--node", "a=127.0.0.1", "--node", "b=127.0.0.1", "--gpus", "0")
    for command in (
        ("run", "my.toml"), ("run", "--on", "slurm", "--nodes", "2", "--gpus", "0", "my.toml"),
        ("node", "run", *node, "--recipe", "my.toml"), ("run", "--resume", begun), ("node", begun, *node),
    ):  # fmt: skip
        done = pipelinerl(*command)
        assert (done.status, done.out) == (2, "")
        assert done.err.startswith(f'pipelinerl: {rows} line 2: field "answer" is missing or null')


def test_run_with_an_agent_that_raises_is_rejected_with_file_and_line_before_any_process_starts(pipelinerl, tmp_path):
    (tmp_path / "agent.py").write_text("async def rollout(task, client):\n    raise RuntimeError('no such game')\n")
    domain = '[[domains]]\nname = "d"\nsource = "addition"\nenvironment = "agent.py:rollout"\n'
    (tmp_path / "my.toml").write_text(f'base = "tiny"\n{domain}')
    done = pipelinerl("run", "my.toml")
    assert (done.status, done.out) == (2, "")
    assert "a trial episode failed" in done.err and f"{tmp_path}/agent.py:2: RuntimeError: no such game" in done.err


def test_operating_system_error_is_reported_in_one_sentence(pipelinerl, monkeypatch, tmp_path, capsys):
    """The errors are a full disk, a path that is too long and a removed working directory."""
    with open("/dev/full", "w") as full, monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", full)
        patched.setattr(sys, "argv", ["pipelinerl", "explain"])
        with pytest.raises(SystemExit, match="1"):
            cli.main()
        with suppress(OSError):
            full.close()
    assert capsys.readouterr().err == "pipelinerl: No space left on device\n"
    done = pipelinerl("status", "x" * 300)
    assert (done.status, done.err) == (1, f"pipelinerl: {'x' * 300}/recipe.toml: File name too long\n")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    done = pipelinerl("check", "tiny")
    assert (done.status, done.err.count("\n")) == (2, 1) and "the working directory no longer exists" in done.err


def test_output_is_escaped_on_a_terminal_that_cannot_encode_its_characters(pipelinerl, monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="latin-1") as narrow:
        monkeypatch.setattr(sys, "stdout", narrow)
        assert pipelinerl("explain", "gspo").status == 0
    assert "J = \\u03a3" in (tmp_path / "out").read_text(encoding="latin-1")


@pytest.mark.parametrize(
    "arguments", ["", "zzz", "run tiny --zzz", "knobs", "knobs set x", "status", "engine --port x"]
)
def test_wrong_use_of_a_command_gives_exit_status_2_and_shows_the_usage(pipelinerl, arguments):
    done = pipelinerl(*arguments.split())
    assert done.status == 2 and "Usage: pipelinerl" in done.out + done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("role", "host", "status"),
    [("controller", "127.0.0.1", 1), ("engine", "127.0.0.1", 1), ("redis", "127.0.0.1", 2), ("redis", "127.0.0.2", 2)],
)
def test_taken_port_is_reported_by_its_number(pipelinerl, role, host, status):
    """With status 1 the supervisor starts a process again. The stream server always listens on loopback too."""
    with listen("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        done = pipelinerl(role, "--host", host, "--port", port, "--run-dir", "here")
    assert done.status == status and f"port {port} on 127.0.0.1 is taken" in done.err


def test_ctrl_c_during_the_imports_of_the_command_line_ends_it_without_a_traceback():
    code = (
        "import os, signal, sys\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "from pipelinerl.__main__ import main\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "main()"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_command_knobs_set_accepts_only_arguments_of_the_form_name_equals_value(pipelinerl, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "controller.json").write_text(json.dumps({"url": "http://127.0.0.1:1", "token": "x"}))
    for wrong in ("k", "=3", " =3"):
        done = pipelinerl("knobs", "set", "run", wrong)
        assert (done.status, done.err) == (2, f"pipelinerl: expected knob=value, got {wrong!r}\n")
    assert "the controller at http://127.0.0.1:1 does not answer" in pipelinerl("knobs", "set", "run", "k=3").err


def commands(group, path="pipelinerl"):
    if not hasattr(group, "commands"):
        yield path, group
        return
    for name, command in group.commands.items():
        if not command.hidden:
            yield from commands(command, f"{path} {name}")


def test_every_command_and_option_has_a_help_and_an_option_means_the_same_in_all_commands():
    helps = {}
    for path, command in commands(get_command(cli.app)):
        assert command.help, path
        for each in command.params:
            text = getattr(each, "help", "")
            assert text, f"{path} {each.name} has no help"
            for option in each.opts:
                helps.setdefault(option, {})[path] = text
    for option in ("--host", "--port", "--set", "--node", "--nodes", "--gpus", "--on"):
        assert len(set(helps[option].values())) == 1, helps[option]


def test_process_takes_its_redis_url_from_the_argument_or_the_environment_or_the_recipe_in_this_order(
    pipelinerl, monkeypatch
):
    """The environment is read because the address may contain a password, and every user can read command lines."""
    urls = []
    monkeypatch.setattr(process, "run_until_signalled", lambda role, identity: urls.append(identity.redis_url))
    Path("own.toml").write_text('base = "tiny"\nstreams.redis_url = "redis://:a@recipe"\n')
    recipe = ("--recipe", "own.toml")
    pipelinerl("actor")
    pipelinerl("actor", *recipe)
    monkeypatch.setenv(REDIS_VARIABLE, "redis://:b@environment")
    pipelinerl("actor", *recipe)
    pipelinerl("actor", *recipe, "--redis-url", "redis://argument")
    assert urls == [LOCAL_REDIS, "redis://:a@recipe", "redis://:b@environment", "redis://argument"]
