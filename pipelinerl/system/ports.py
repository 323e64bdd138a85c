"""Ports to listen at: find free ones, and say whether one is taken.

A port found free may be taken before its service binds it; the service then refuses to start and says so.
"""

from __future__ import annotations

import os
import socket
from itertools import count as counting
from typing import Final

from pipelinerl.errors import AddressError

_LOOPBACK: Final = "127.0.0.1"
#: Below Linux' default range of outgoing ports (32768 and up).
_LISTENING: Final = range(20000, 32000)
#: A connection that stays on the machine is made at once.
_ANSWERS_S: Final = 2.0
#: How many places this process has looked at.
_LOOKED_AT: Final = counting()


def free_ports(count: int, host: str = _LOOPBACK) -> tuple[int, ...]:
    """`count` different ports of an address of this machine, on which nothing listens, below those of who connects.

    A client that keeps trying to reach a service that is away could otherwise be given the service's own port, connect
    to itself, and keep the service from coming back.

    Raises:
        AddressError: there are fewer; or nobody reaches 127.0.0.1, where all of a run's services listen.
    """
    if host == _LOOPBACK:
        _check_loopback()
    found: list[int] = []
    for _ in _LISTENING:
        # Launchers that start together look in different places, and one process never in the same place twice: what
        # it was given a moment ago may not be bound yet.
        port = _LISTENING[(os.getpid() * 37 + next(_LOOKED_AT)) % len(_LISTENING)]
        if is_free(port, host):
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise AddressError(f"fewer than {count} ports of {_LISTENING.start} to {_LISTENING.stop - 1} are free")


def _check_loopback() -> None:
    """In some containers and namespaces the interface is down, and each service would be waited for to no end."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as service:
            socket.create_connection(service.getsockname(), _ANSWERS_S).close()
    except OSError as error:
        raise AddressError(
            f"no program here reaches another at 127.0.0.1 ({error.strerror or error}): the loopback interface is "
            "down, or something filters it; as root, `ip link set lo up` brings it up"
        ) from None


def family_of(host: str) -> socket.AddressFamily:
    """Of an address, or of a host's name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_free(port: int, host: str = _LOOPBACK) -> bool:
    """Could a service listen on this port of an address of this machine now?"""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
