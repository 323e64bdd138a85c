"""The stream server (Redis or Valkey) that a run starts for itself: start, stop, taken ports, death of its parent."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from threading import Timer

import pytest

from pipelinerl.errors import AddressError, DeadlineError, UserError
from pipelinerl.streams import embedded_redis
from pipelinerl.streams.embedded_redis import EmbeddedRedis, answers, command, server_binary, server_url
from pipelinerl.system.machine import free_ports
from tests.patience import PATIENCE_S, is_running, wait_until

REPOSITORY = Path(__file__).parents[2]


def test_stream_server_starts_answers_and_stops_without_leaving_a_process(tmp_path):
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


def test_stream_server_listens_only_on_loopback_and_only_its_owner_can_read_its_password(tmp_path):
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


def test_restarted_stream_server_keeps_its_address_and_data(tmp_path):
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


def test_start_replaces_a_stream_server_that_is_dying(tmp_path):
    """After `kill -9`, a process may exist for a while without answering; here it is suspended and then killed."""
    with EmbeddedRedis(tmp_path) as server:
        dying = server.pid
        os.kill(dying, signal.SIGSTOP)
        death = Timer(0.5, os.kill, (dying, signal.SIGKILL))
        death.start()
        server.start()
        death.join()
        assert server.pid != dying
        assert answers(server.url)


def test_stream_server_uses_another_port_if_its_port_is_taken_and_fails_to_start_without_a_free_one(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        lost = taken.getsockname()[1]
        with EmbeddedRedis(tmp_path, choose_ports=lambda count: (lost, *free_ports(count - 1))) as server:
            assert answers(server.url)
            assert server.url != server_url(tmp_path, lost)
        with pytest.raises(AddressError, match="could not use any of the ports"):
            EmbeddedRedis(tmp_path, choose_ports=lambda _: [lost]).start()


def test_stream_server_ends_when_its_parent_is_killed(tmp_path):
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
    try:
        wait_until(lambda: not is_running(pid), "the server has ended")
    except AssertionError:
        os.kill(pid, signal.SIGKILL)
        raise


def test_stream_server_whose_data_cannot_be_read_fails_to_start_with_the_reason(tmp_path):
    with EmbeddedRedis(tmp_path):
        pass
    (tmp_path / "appendonlydir" / "appendonly.aof.manifest").write_text("no manifest at all\n")
    with pytest.raises(UserError, match=r"exited at startup: .*(?i:manifest)"):
        EmbeddedRedis(tmp_path).start()


def test_stream_server_that_does_not_answer_is_killed_after_the_timeout(tmp_path, monkeypatch):
    sleeper = tmp_path / "valkey-server"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o700)
    monkeypatch.setattr(embedded_redis, "server_binary", lambda: sleeper)
    server = EmbeddedRedis(tmp_path / "data", timeout_s=0.3)
    with pytest.raises(DeadlineError, match=r"did not answer on port \d+ for 0.3 s"):
        server.start()
    with pytest.raises(UserError, match="not running"):
        _ = server.pid


def test_redis_server_from_the_path_is_used_if_the_valkey_package_is_not_installed(tmp_path, monkeypatch):
    assert server_binary().name == "valkey-server"
    monkeypatch.setattr(embedded_redis, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no stream server was found.*redis_url"):
        server_binary()
    other = tmp_path / "redis-server"
    other.write_text("")
    other.chmod(0o700)
    assert server_binary() == other


def test_second_stream_server_in_one_directory_is_rejected_until_the_first_has_ended(tmp_path):
    """Both would append to one file, and the second would replace the first one's configuration."""
    directory, ports = tmp_path / "redis", free_ports(2)
    command(directory, ports[0])  # writes the password
    role = [sys.executable, "-m", "pipelinerl.cli", "redis", "--run-dir", str(tmp_path), "--port"]
    first = subprocess.Popen([*role, str(ports[0])], cwd=REPOSITORY)
    second = None
    try:
        wait_until(lambda: answers(server_url(directory, ports[0])), "the first server answers")
        with (tmp_path / "errors").open("w") as errors:
            second = subprocess.Popen([*role, str(ports[1])], cwd=REPOSITORY, stderr=errors)
        wait_until(lambda: second.poll() is not None or answers(server_url(directory, ports[1])), "it decides")
        assert second.poll() == 2
        assert "another stream server already uses" in (tmp_path / "errors").read_text()
        first.kill()
        first.wait(PATIENCE_S)
        second = subprocess.Popen([*role, str(ports[1])], cwd=REPOSITORY)
        wait_until(lambda: answers(server_url(directory, ports[1])), "the second server answers")
    finally:
        for process in (first, second):
            if process is not None:
                process.kill()
                process.wait(PATIENCE_S)
