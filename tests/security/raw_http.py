"""Requests as bytes on a socket: what no well-behaved client sends."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S


def connect(url: str) -> socket.socket:
    """A connection to the server at `url`."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


def say(connection: socket.socket, data: bytes) -> None:
    """Send; a server that has closed meanwhile has answered before."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


def hear(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    heard = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            heard += piece
    return heard


def exchange(url: str, data: bytes) -> bytes:
    """What the server answers to these bytes, to the end of the connection."""
    with connect(url) as connection:
        say(connection, data)
        return hear(connection)


def statuses(heard: bytes) -> list[int]:
    """The statuses of all answers in there."""
    return [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]


def code(heard: bytes) -> str:
    """The code of the last refusal in there."""
    found: dict[str, Any] = json.loads(heard[heard.rindex(b'{"error"') :])
    return str(found["error"]["code"])
