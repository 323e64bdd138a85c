"""Loopback ports: find free ones, and say whether one is taken.

A port found free may be taken before its service binds it; the service then refuses to start and says so.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack


def free_ports(count: int) -> tuple[int, ...]:
    """`count` different ports of 127.0.0.1 on which nothing listens now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return tuple(one.getsockname()[1] for one in sockets)


def is_free(port: int) -> bool:
    """Could a service listen on this port of 127.0.0.1 now?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
