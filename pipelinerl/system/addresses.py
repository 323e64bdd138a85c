"""Which address of this machine others reach it by: what faces them, as the routing table has it. No packet is sent.

`without_name_servers` keeps a thread from asking whose address another is. torch's TCPStore asks with each connection
that it makes, for a line of its log; and for a loopback address, too, which it writes in a form that no hosts file has.
Where the name server does not answer, or loses one of many questions that come at once, the C library waits for
seconds: a group of 64 engines formed in 5.1 s, and in 0.1 s without. Torch says once in a process that the name cannot
be had.
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
    """The address that faces (`host`, `port`).

    Raises:
        OSError: nobody knows the host, or no route leads there.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Return the address that faces the network at large, or loopback where there is no network."""
    try:
        return address_towards("192.0.2.1", 9)  # documentation's: no packet is sent
    except OSError:
        return LOOPBACK


def address_facing(urls: Iterable[str]) -> str:
    """One address by which all who serve `urls` reach this machine: loopback while all of them are on it.

    An engine beside us reaches our outward address as well; one elsewhere never reaches our loopback. Where engines
    come by several networks, the first decides; one that cannot be found has no say.
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
    """What this thread looks up within, it looks up in files; a no-op without glibc, or where `host` is no address: the
    name of whom it talks to may be known to a name server alone."""
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
    """The beginning of this thread's `struct __res_state`: seconds to the first timeout, then how often it is tried."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "__res_init")):
        return None
    library.__res_init()  # else the first question would begin with the defaults
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return library.__res_state()
