"""This machine's addresses as seen by others, from the routing table and without sending a packet.

`without_name_servers` prevents reverse look-ups in the current thread. torch's TCPStore looks up the peer's name for
each connection, for a log line, even for loopback addresses in a form that no hosts file contains. If the name server
does not answer, or drops some of many queries, the C library waits for seconds: a group of 64 engines formed in 5.1 s,
and in 0.1 s without the look-ups. torch then logs once per process that the name is unavailable.
"""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import urlsplit

LOOPBACK: Final = "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """Return this machine's address that faces (`host`, `port`).

    Raises:
        OSError: the host is unknown, or there is no route to it.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Return the address that other networks would reach this machine by; loopback if there is no network."""
    try:
        return address_towards("192.0.2.1", 9)  # reserved for documentation; sends no packet
    except OSError:
        return LOOPBACK


def address_facing(urls: Iterable[str]) -> str:
    """Return one address at which the servers at `urls` reach this machine; loopback if all servers are on this
    machine.

    A server on this machine also reaches the outward address, but a remote server never reaches loopback. If the
    servers are on several networks, the first of them decides; hosts that cannot be resolved are ignored.
    """
    for parts in map(urlsplit, urls):
        try:
            address = address_towards(parts.hostname or LOOPBACK, parts.port or 80)
        except OSError:
            continue
        if not ip_address(address).is_loopback:
            return address
    return LOOPBACK


@contextmanager
def without_name_servers(host: str) -> Iterator[None]:
    """Restrict name look-ups of this thread to files, so that no name server is asked.

    No-op without glibc. Also a no-op if `host` is a name instead of an address, since only a name server may be able to
    resolve it.
    """
    state = _resolver() if _is_address(host) else None
    if state is None:
        yield
        return
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def _resolver() -> Any:
    """Return the start of this thread's `struct __res_state`: the timeout of the first query in seconds, and the
    attempts.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "__res_init")):
        return None
    library.__res_init()  # otherwise the first query would reset our values
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return library.__res_state()
