"""Free ports of this machine.

A free port may be taken before its service binds it; the service then fails to start and reports that.
"""

from __future__ import annotations

import os
import socket
from itertools import count as counting
from typing import Final

from pipelinerl.errors import AddressError

_LOOPBACK: Final = "127.0.0.1"
#: Ports below Linux's default range of outgoing ports (32768 and up).
_LISTENING: Final = range(20000, 32000)
#: Time limit in seconds for a loopback connection, which normally takes no time.
_ANSWERS_S: Final = 2.0
#: Counts the ports that this process has tried.
_LOOKED_AT: Final = counting()


def free_ports(count: int, host: str = _LOOPBACK) -> tuple[int, ...]:
    """Return `count` different free ports of a local address, below the range of outgoing ports.

    A client that keeps reconnecting to a stopped service could be assigned the service's port as its own outgoing port.
    It would then be connected to itself, and the service could not bind its port again. Ports below the range prevent
    this.

    Raises:
        AddressError: there are too few free ports; or 127.0.0.1, where all services of a run listen, is
            unreachable.
    """
    if host == _LOOPBACK:
        _check_loopback()
    found: list[int] = []
    for _ in _LISTENING:
        # Start at a port that depends on the process, so launchers that start together try different ports. Never try a
        # port twice, since a port returned a moment ago may not be bound yet.
        port = _LISTENING[(os.getpid() * 37 + next(_LOOKED_AT)) % len(_LISTENING)]
        if is_free(port, host):
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise AddressError(f"fewer than {count} ports of {_LISTENING.start} to {_LISTENING.stop - 1} are free")


def _check_loopback() -> None:
    """Check that the loopback interface is up. In some containers it is down, and services would wait for it
    forever.
    """
    try:
        with socket.create_server((_LOOPBACK, 0)) as service:
            socket.create_connection(service.getsockname(), _ANSWERS_S).close()
    except OSError as error:
        raise AddressError(
            f"programs cannot reach each other at 127.0.0.1 ({error.strerror or error}): the loopback interface is "
            "down, or something filters it; as root, `ip link set lo up` brings it up"
        ) from None


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of an address or a host name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_free(port: int, host: str = _LOOPBACK) -> bool:
    """Return True if a service could bind this port of a local address now."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True
