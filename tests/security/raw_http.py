"""Requests as raw bytes on a socket, as no well-behaved client sends them."""

from __future__ import annotations

import json
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S


def connect(url: str) -> socket.socket:
    """Connect to the server at `url`."""
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


def say(connection: socket.socket, data: bytes) -> None:
    """Send the data; if the server has closed the connection, its answer has already arrived."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


def hear(connection: socket.socket) -> bytes:
    """Receive until the server closes the connection."""
    heard = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            heard += piece
    return heard


def exchange(url: str, data: bytes) -> bytes:
    """Return the server's whole answer to these bytes."""
    with connect(url) as connection:
        say(connection, data)
        return hear(connection)


def statuses(heard: bytes) -> list[int]:
    """Return the status codes of all answers in `heard`."""
    return [int(part[:3]) for part in heard.split(b"HTTP/1.1 ")[1:]]


def code(heard: bytes) -> str:
    """Return the error code of the last rejection in `heard`."""
    found: dict[str, Any] = json.loads(heard[heard.rindex(b'{"error"') :])
    return str(found["error"]["code"])
