"""Passwords and tokens are written only to files that only their owner may read, and appear in no output."""

import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipelinerl.config.recipe import load, parse, save, to_table
from pipelinerl.errors import RecipeError, UserError
from pipelinerl.observability.events import EventLog
from pipelinerl.plugins.watch.report import write_report
from pipelinerl.roles.process import TOKEN_VARIABLE, Identity, identity_of, token_of
from pipelinerl.roles.role import RoleOptions, without_password
from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "hunter2"
URLS = [
    f"redis://:{PASSWORD}@db.lab:6379/0",
    f"redis://user:{PASSWORD}@db.lab",
    f"redis://db.lab?password={PASSWORD}&db=1",
    f"rediss://db.lab/0?db=1&username=u&password={PASSWORD}",
]


def with_streams(url):
    """Return a shipped recipe with `url`, which may contain a password, as its Redis URL."""
    return parse(to_table(load("tiny")) | {"streams": {"redis_url": url}})


@pytest.mark.parametrize("url", URLS)
def test_html_report_omits_the_redis_password(url, tmp_path):
    save(with_streams(url), tmp_path / "recipe.toml")
    with EventLog(tmp_path / "events.jsonl") as events:
        events.write("run_started", elapsed_s=0.0, run="tiny", knobs={})
        events.write("engine_unreachable", elapsed_s=1.0, reason=f"no answer from {url}")
    page = write_report(tmp_path).html.read_text()
    assert PASSWORD not in page and "db.lab" in page


@pytest.mark.parametrize("url", URLS)
def test_printed_recipe_hides_the_redis_password_and_only_the_owner_can_read_the_saved_recipe(url, tmp_path):
    config = with_streams(url)
    identity = Identity(
        config=config, run_dir=tmp_path, name="a", redis_url=url, controller_url="http://c", token="hunter2-token"
    )
    for shown in (repr(config), str(config), config.model_dump_json(), str(to_table(config)), repr(identity)):
        assert PASSWORD not in shown
    path = tmp_path / "recipe.toml"
    save(config, path)
    assert path.stat().st_mode & 0o777 == 0o600
    kept = load(str(path), []).streams.redis_url
    assert kept is not None and kept.get_secret_value() == url


# --- tokens and arguments ---------------------------------------------------------------------------------------------


def test_concurrent_processes_started_without_an_auth_token_all_use_the_same_new_token(tmp_path, monkeypatch):
    """If they had no token, a server on loopback would answer every program of every user of the machine."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    with ThreadPoolExecutor(8) as pool:
        tokens = set(pool.map(lambda _: token_of(None, tmp_path / "run"), range(8)))
    (token,) = tokens
    assert len(token) >= 32 and (tmp_path / "run" / "tokens.json").stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path / "run") == ["tokens.json"]
    monkeypatch.setenv(TOKEN_VARIABLE, "given")
    assert token_of(None, tmp_path / "run") == "given"


def test_process_that_cannot_write_its_auth_token_file_starts_only_with_the_option_no_token(tmp_path, monkeypatch):
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--no-token"):
        token_of(None, tmp_path / "file" / "run")
    assert identity_of(RoleOptions(name="a", run_dir=tmp_path, no_token=True)).token is None
    assert identity_of(RoleOptions(name="a", run_dir=tmp_path)).token


@pytest.mark.parametrize("spelled", [["--redis-url", URLS[0]], [f"--redis-url={URLS[0]}"]])
def test_redis_password_in_command_line_arguments_is_moved_to_the_environment(spelled):
    moved = without_password(["python", "-m", "x", "actor", *spelled, "--name", "a"], {"HOME": "/"})
    assert moved == (["python", "-m", "x", "actor", "--name", "a"], {"HOME": "/", "PIPELINERL_REDIS_URL": URLS[0]})
    assert without_password(["x", "--redis-url", "redis://127.0.0.1:6379/0"], {}) is None


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "override", ["streams.redis_url={}", 'streams.redis_url = "{}"', 'engine.servers=["{}"]', "{}"]
)
def test_password_in_a_command_line_override_is_rejected(override, url):
    """Command lines are visible in the process list. Overrides are the values of --set and the words `key=value`."""
    with pytest.raises(RecipeError) as refused:
        load("tiny", [override.format(url)])
    assert PASSWORD not in str(refused.value)
    if "=" in override:
        assert "$PIPELINERL_REDIS_URL" in str(refused.value) and override.partition("=")[0].strip() in str(
            refused.value
        )


def test_operating_systems_process_list_omits_the_redis_password(tmp_path):
    """The process restarts itself without the password in its arguments, so the kernel no longer lists it."""
    command = [sys.executable, "-m", "pipelinerl.cli", "actor", "--run-dir", str(tmp_path)]
    role = subprocess.Popen([*command, "--redis-url", f"redis://:{PASSWORD}@127.0.0.1:9/0"], stderr=subprocess.DEVNULL)
    try:
        deadline, seen = time.monotonic() + PATIENCE_S, b""
        while time.monotonic() < deadline and role.poll() is None:
            seen = Path(f"/proc/{role.pid}/cmdline").read_bytes()
            if seen and b"--redis-url" not in seen:
                break
            time.sleep(0.02)
        assert b"actor" in seen and PASSWORD.encode() not in seen
    finally:
        role.kill()
        role.wait()


def test_processes_of_a_run_import_no_library_from_the_current_directory(tmp_path):
    """They hold the run's token; a user may stand in a folder with a `redis.py` of any origin."""
    for name in ("redis", "torch", "uvloop", "msgspec", "numpy", "typer", "pydantic", "httpx", "json"):
        (tmp_path / f"{name}.py").write_text("open('executed', 'w').close()")
    (tmp_path / "rewards.py").write_text("import json\ndef score(completion, answer):\n    return 1.0\n")
    command = [sys.executable, "-P", "-m", "pipelinerl.cli", "actor", "--set", "run.steps=-1"]
    role = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert role.returncode == 2 and not (tmp_path / "executed").exists(), role.stderr
    load_it = "from pipelinerl.system.references import load_reference as load; print(load('rewards:score')(1, 2))"
    command = [sys.executable, "-P", "-c", load_it]
    used = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S)
    assert used.stdout == "1.0\n" and not (tmp_path / "executed").exists(), used.stderr


def test_every_command_that_starts_a_python_module_ignores_the_current_directory():
    commands = [
        f"{path}: {found}"
        for folder in ("pipelinerl", "launch")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for found in re.findall(r"(?:executable|python|\"python3?\"),\s*\"-m\".*", path.read_text())
    ]
    assert [each for each in commands if "plugins/conformance/" not in each] == []  # it runs the checkout's own modules
