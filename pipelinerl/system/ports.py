"""Loopback ports: find free ones, and say whether one is taken.

A port found free may be taken before its service binds it; the service then refuses to start and says so.
"""

from __future__ import annotations

import os
import socket
from itertools import islice
from typing import Final

from pipelinerl.errors import AddressError

#: Below Linux' default range of outgoing ports (32768 and up).
_LISTENING: Final = range(20000, 32000)


def free_ports(count: int) -> tuple[int, ...]:
    """`count` different ports of 127.0.0.1 on which nothing listens now, below those of outgoing connections.

    A client that keeps trying to reach a service that is away could otherwise be given the service's own port, connect
    to itself, and keep the service from coming back.
    """
    start = os.getpid() * 37 % len(_LISTENING)  # launchers that start together look in different places
    candidates = (*_LISTENING[start:], *_LISTENING[:start])
    free = tuple(islice(filter(is_free, candidates), count))
    if len(free) < count:
        raise AddressError(f"fewer than {count} ports of {_LISTENING.start} to {_LISTENING.stop - 1} are free")
    return free


def is_free(port: int) -> bool:
    """Could a service listen on this port of 127.0.0.1 now?"""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
