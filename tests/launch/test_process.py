"""Whom a health check takes for healthy."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

from launch.plan import ProcessSpec
from launch.process import Process
from pipelinerl.streams.embedded_redis import EmbeddedRedis


def healthy(port: int, password: Path) -> bool:
    spec = ProcessSpec(name="redis", argv=("x",), health=f"redis://127.0.0.1:{port}{quote(str(password))}")
    return Process(spec, password.parent).answers()


def test_a_stream_server_is_healthy_once_it_plays_ping_pong_by_its_password(tmp_path: Path) -> None:
    folder = tmp_path / "a run #1"
    with EmbeddedRedis(folder) as server:
        port = int(server.url.rpartition(":")[2])
        assert healthy(port, folder / "password")
        (tmp_path / "other").write_text("guess")
        assert not healthy(port, tmp_path / "other"), "it is another run's"
        assert not healthy(port, tmp_path / "absent"), "the server has not begun"
    assert not healthy(port, folder / "password")


@pytest.mark.parametrize(
    "said", [b"", b"+OK\r\n", b"+OK\r\n-LOADING Redis is loading the dataset in memory\r\n", b"SSH-2.0\r\n"]
)
def test_one_that_only_accepts_is_not_healthy(tmp_path: Path, said: bytes) -> None:
    (tmp_path / "password").write_text("secret")
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connected, _ = listening.accept()
            with connected:
                connected.recv(100)
                connected.sendall(said)

        answering = threading.Thread(target=answer)
        answering.start()
        assert not healthy(listening.getsockname()[1], tmp_path / "password")
        answering.join()
