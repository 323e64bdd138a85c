"""A child process is killed and reaped however its start or end is interrupted, and its end is described."""

import asyncio
import os
import sys
import threading

import pytest

from pipelinerl.system.child import Child, ChildLost
from tests.patience import PATIENCE_S, is_running, wait_until

READY = """
import json, os, socket, subprocess, sys, time
connection = socket.socket(fileno=os.dup(0))
say = lambda message: connection.sendall(json.dumps(message).encode() + b"\\n")
"""
ECHO = READY + "say({'ready': True})\nfor line in connection.makefile('rb'): connection.sendall(line)"


async def started(script, **options):
    options = {"startup_s": PATIENCE_S, **options}
    return await Child.start([sys.executable, "-S", "-c", script], "the child", **options)


async def test_child_answers_messages_until_it_is_closed():
    child = await started(ECHO)
    assert child.first == {"ready": True} and child.lines.is_open
    for message in ({"a": "\ud800\n"}, "x" * 60_000, None):
        await child.lines.send(message)
        assert await child.lines.receive() == message
    await child.close()
    assert child.has_ended and not child.lines.is_open


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (READY + "say({'error': 'no such module'})", "^no such module$"),
        ("raise SystemExit(3)", "^the child did not start"),
        (READY + "connection.sendall(b'hello\\n'); time.sleep(600)", "^the child did not start"),
        ("import time; time.sleep(600)", "^the child did not start"),
    ],
    ids=["own reason", "ends", "not JSON", "silent"],
)
async def test_child_that_does_not_get_ready_is_reported_and_killed(script, reason):
    with pytest.raises(ChildLost, match=reason):
        await started(script, startup_s=1.0 if "sleep(600)" in script else PATIENCE_S)


@pytest.mark.parametrize(("script", "how"), [("os._exit(3)", "ended with status 3"), ("os.abort()", "by SIGABRT")])
async def test_end_of_a_child_is_described(script, how):
    child = await started(READY + "say({})\n" + script)
    with pytest.raises(EOFError):
        await child.lines.receive()
    assert how in await child.ending(timeout_s=PATIENCE_S)
    await child.close()


@pytest.mark.skipif(sys.platform != "linux", reason="descendants are found on Linux")
async def test_descendants_of_a_killed_child_end_with_it(tmp_path):
    sleeper = "subprocess.Popen(['sleep', '600'], start_new_session=True).pid"
    child = await started(READY + f"say({{'pid': {sleeper}}}); time.sleep(600)")
    pid = child.first["pid"]
    assert is_running(pid)
    await child.close()
    wait_until(lambda: not is_running(pid), "the descendant has ended")


async def test_cancelled_close_of_a_child_still_waits_for_its_end():
    child = await started(ECHO)
    closing = asyncio.create_task(child.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert child.has_ended


async def test_killing_an_ended_child_again_does_not_reap_it_before_asyncio_does(monkeypatch, caplog):
    reaps, reap = threading.Event(), os.waitpid
    monkeypatch.setattr(os, "waitpid", lambda *arguments: reap(*arguments) if reaps.wait(PATIENCE_S) else None)
    child = await started(ECHO)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended; asyncio has not reaped it
    child.kill()
    reaps.set()
    await child.close()
    assert not [each for each in caplog.messages if "Unknown child process" in each]


@pytest.mark.parametrize("sent", [b"x" * 2000 + b"\n", b"nonsense\n", b"[" * 900 + b"\n"])
async def test_line_that_is_no_message_raises_value_error(sent):
    child = await started(READY + f"say({{}}); connection.sendall({sent!r}); time.sleep(600)", most_bytes=1000)
    with pytest.raises(ValueError, match=r"."):
        await child.lines.receive()
    await child.close()
