"""A real server, started, stopped, robbed of its port, orphaned."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path
from threading import Timer

import pytest

from pipelinerl.errors import AddressError, DeadlineError, UserError
from pipelinerl.streams import embedded_redis
from pipelinerl.streams.embedded_redis import EmbeddedRedis, answers, command, server_binary, server_url
from pipelinerl.system.ports import free_ports
from tests.patience import PATIENCE_S

REPOSITORY = Path(__file__).parents[2]


def is_running(pid: int) -> bool:
    """A zombie counts as ended: whoever adopted it has merely not looked yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not is_running(pid)


def test_it_starts_answers_stops_and_leaves_no_process(tmp_path: Path) -> None:
    server = EmbeddedRedis(tmp_path)
    with pytest.raises(UserError, match="start"):
        _ = server.url
    with server:
        url, pid = server.url, server.pid
        assert answers(url)
        assert server.start() is server
        assert server.pid == pid
        assert not answers(url.replace("redis://:", "redis://:not"))
    assert not is_running(pid)
    assert not answers(url)
    server.stop()


def test_it_listens_on_loopback_alone_and_its_secrets_are_private(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "new") as server:
        port = int(server.url.rpartition(":")[2])
        for name in ("redis.conf", "password"):
            assert stat.S_IMODE((tmp_path / "new" / name).stat().st_mode) == 0o600
        assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
        sockets = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        listening = [address for address, _, state in sockets if state == "0A" and address.endswith(f":{port:04X}")]
        assert listening == [f"0100007F:{port:04X}"]
        assert "password" not in " ".join(Path(f"/proc/{server.pid}/cmdline").read_text().split("\0")[1:])
    assert len((tmp_path / "new" / "password").read_text()) >= 32


def test_a_restart_has_the_same_address_and_the_same_data(tmp_path: Path) -> None:
    from redis import Redis

    server = EmbeddedRedis(tmp_path / 'a "quoted" \\ path').start()
    url = server.url
    with Redis.from_url(url, protocol=2) as client:
        client.xadd("s", {"p": b"kept"}, id="1-0")
        for end in (lambda: os.kill(server.pid, signal.SIGKILL), server.stop):
            end()
            server.start()
            assert server.url == url
            assert client.xlen("s") == 1
    server.stop()


def test_one_that_is_still_dying_is_no_server_that_runs(tmp_path: Path) -> None:
    """On a busy machine a process is there for a while after its `kill -9`; here it is stopped until that comes."""
    with EmbeddedRedis(tmp_path) as server:
        dying = server.pid
        os.kill(dying, signal.SIGSTOP)
        death = Timer(0.5, os.kill, (dying, signal.SIGKILL))
        death.start()
        server.start()
        death.join()
        assert server.pid != dying
        assert answers(server.url)


def test_a_port_that_is_taken_meanwhile_is_exchanged(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lost = taken.getsockname()[1]
        with EmbeddedRedis(tmp_path, choose_ports=lambda count: (lost, *free_ports(count - 1))) as server:
            assert answers(server.url)
            assert server.url != server_url(tmp_path, lost)


def test_no_port_to_be_had(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        server = EmbeddedRedis(tmp_path, choose_ports=lambda count: (taken.getsockname()[1],) * count)
        with pytest.raises(AddressError, match="could not have any of the ports"):
            server.start()


def test_it_ends_with_its_parent_even_when_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path\n"
        "from pipelinerl.streams.embedded_redis import EmbeddedRedis\n"
        "server = EmbeddedRedis(Path(sys.argv[1])).start(); print(server.pid, flush=True); time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    ended = ends_within(pid, PATIENCE_S)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    assert ended


def test_a_server_that_cannot_read_its_data_says_so(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path):
        pass
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest at all\n")
    with pytest.raises(UserError, match=r"ended as it started: .*(?i:manifest)"):
        EmbeddedRedis(tmp_path).start()


def test_a_server_that_does_not_answer_is_given_up_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "valkey-server"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(embedded_redis, "server_binary", lambda: sleeper)
    server = EmbeddedRedis(tmp_path / "data", timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"did not answer on port \d+ for 0.3 s"):
        server.start()
    with pytest.raises(UserError, match="not running"):
        _ = server.pid


def test_without_the_wheel_a_server_on_path_is_taken_and_without_either_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert server_binary().name == "valkey-server"
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no stream server to run.*redis_url"):
        server_binary()
    other = tmp_path / "redis-server"
    other.write_text("")
    other.chmod(0o700)
    assert server_binary() == other


def test_the_command_runs_in_the_foreground(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    with subprocess.Popen(command(tmp_path, port)) as process:
        url = server_url(tmp_path, port)
        deadline = time.monotonic() + PATIENCE_S
        while not answers(url) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert answers(url)
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
