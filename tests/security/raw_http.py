"""Send requests as raw bytes on a socket, to test requests that no HTTP library would send."""

import json
import socket
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from tests.patience import PATIENCE_S


def connect(url):
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)


def say(connection, data):
    """Send the data; ignore errors if the server has already answered and closed the connection."""
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)


def hear(connection):
    """Return all bytes that the server sends until it closes the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def exchange(url, data):
    """Send these bytes on a new connection; return all bytes that the server answers."""
    with connect(url) as connection:
        say(connection, data)
        return hear(connection)


def statuses(received):
    """Return the status codes of all HTTP responses in the received bytes."""
    return [int(part[:3]) for part in received.split(b"HTTP/1.1 ")[1:]]


def code(received):
    """Return the error code in the body of the last HTTP response in the received bytes."""
    found: dict[str, Any] = json.loads(received[received.rindex(b'{"error"') :])
    return str(found["error"]["code"])
