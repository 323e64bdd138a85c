"""The start and end of every process of a run: its secrets, its exit status, its message on stderr."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from pipelinerl.config.recipe import load
from pipelinerl.errors import AddressError, DeadlineError, ModelError, RecipeError, UserError
from pipelinerl.roles.process import TOKEN_VARIABLE, Identity, read_token, run_until_signalled
from pipelinerl.streams.embedded_redis import EmbeddedRedis
from tests.patience import PATIENCE_S


def identity(run_dir, *, redis_url="memory://"):
    return Identity(run_dir=run_dir, config=load("tiny"), name="role", redis_url=redis_url)


def test_garbage_collector_skips_objects_that_existed_when_a_process_started():
    program = (
        "import gc, time, torch\n"
        "from pipelinerl.roles.process import freeze_gc\n"
        "def full():\n"
        "    began = time.perf_counter(); gc.collect(); return time.perf_counter() - began\n"
        "gc.collect(); before = min(full() for _ in range(3)); freeze_gc(); after = min(full() for _ in range(3))\n"
        "print(after / before)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S)
    assert float(done.stdout) < 0.1, done.stderr


def test_process_reads_its_token_from_a_file_or_from_the_environment(tmp_path, monkeypatch):
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"token": "secret"}))
    monkeypatch.setenv(TOKEN_VARIABLE, "other")
    assert (read_token(file), read_token(None)) == ("secret", "other")
    monkeypatch.setenv(TOKEN_VARIABLE, "")
    assert read_token(None) is None


def test_launch_id_derived_from_the_token_does_not_reveal_the_token(tmp_path):
    first, second = (replace(identity(tmp_path), token=token).launch for token in ("token-1", "token-2"))
    assert first != second and "token" not in first
    assert identity(tmp_path).launch == ""


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '"secret"', "{}", '{"token": null}', '{"token": ""}', '{"token": 3}', "\udcff"]
)
def test_token_file_without_a_token_is_rejected(tmp_path, content):
    """An empty or missing token file must never mean "no token", because that would disable authentication."""
    file = tmp_path / "tokens.json"
    file.write_text(content, errors="surrogateescape")
    with pytest.raises(UserError, match=r"tokens.json must hold \{\"token\": \"…\"\}"):
        read_token(file)
    with pytest.raises(UserError, match="must hold"):
        read_token(tmp_path / "absent")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RecipeError("run.steps: must be given"), 2, "pipelinerl: run.steps: must be given\n"),
        (
            ExceptionGroup("", [ModelError("a"), ExceptionGroup("", [RecipeError("b")])]),
            2,
            "pipelinerl: a\npipelinerl: b\n",
        ),
        (AddressError("port 1 is taken"), 1, "pipelinerl: port 1 is taken\n"),
        (ExceptionGroup("", [RecipeError("a"), AddressError("b")]), 1, "pipelinerl: a\npipelinerl: b\n"),
        (DeadlineError("step 3 waited"), 1, '"message": "DeadlineError: step 3 waited"'),
        (ValueError("inside"), 1, '"trace": "Traceback'),
        (ExceptionGroup("", [RecipeError("a"), ValueError("b")]), 1, '"message": "ValueError: b"'),
    ],
)
def test_error_of_a_process_determines_its_exit_status_and_its_message_on_stderr(
    tmp_path, capsys, error, status, message
):
    async def role(_):
        raise error

    with pytest.raises(SystemExit) as ended:
        run_until_signalled(role, identity(tmp_path))
    assert ended.value.code == status
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("has_begun", [True, False])
def test_signal_ends_a_process_after_its_cleanup_with_a_failure_status(tmp_path, number, has_begun):
    """While a process imports torch, its event loop does not run, so the loop's signal handlers would run too late."""
    happened = []

    async def role(_):
        if has_begun:
            await asyncio.sleep(0)
        try:
            os.kill(os.getpid(), number)
            time.sleep(0.01)
            if has_begun:
                await asyncio.sleep(10)
            happened.append("loaded")
        finally:
            happened.append("in order")

    with pytest.raises(SystemExit) as ended:
        run_until_signalled(role, identity(tmp_path))
    assert (ended.value.code, happened) == (143, ["in order"])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_user_code_that_exits_in_a_subtask_or_a_callback_does_not_end_the_process(tmp_path, capfd, kind):
    def leave():
        raise kind("of user code")

    async def leave_later():
        await asyncio.sleep(0)
        leave()

    seen = []

    async def role(_):
        asyncio.get_running_loop().call_soon(leave)
        seen.extend(await asyncio.gather(leave_later(), asyncio.sleep(0.01, "done"), return_exceptions=True))

    run_until_signalled(role, identity(tmp_path))  # returns: the process ends with status 0
    assert [type(each) for each in seen] == [kind, str]
    assert capfd.readouterr().err.count("user code in this process raised") == 2


async def test_password_of_the_embedded_redis_server_is_read_from_its_data_directory(tmp_path):
    with EmbeddedRedis(tmp_path / "redis") as server:
        bare = server.url.replace(f":{(tmp_path / 'redis' / 'password').read_text()}@", "")
        assert "@" not in bare
        stream = await identity(tmp_path, redis_url=bare).stream()
        await stream.append("x", [b"1"])
        await stream.close()
        (tmp_path / "redis" / "password").write_text("wrong")
        with pytest.raises(AddressError, match="password") as refused:
            await identity(tmp_path, redis_url=bare).stream()
        assert "wrong" not in str(refused.value).replace("wrong password", "")


@pytest.mark.parametrize("url", ["http://x", "redis://127.0.0.1:notaport/0", "redis://127.0.0.1:99999/0", ""])
async def test_invalid_redis_address_is_rejected_without_revealing_the_password(tmp_path, url):
    (tmp_path / "redis").mkdir()
    (tmp_path / "redis" / "password").write_text("secret")
    with pytest.raises(AddressError) as refused:
        await identity(tmp_path, redis_url=url).stream()
    assert "secret" not in str(refused.value)
