"""This machine: its addresses as others see them, its free ports, and whether it has an accelerator.

Addresses come from the routing table, without sending a packet.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from itertools import count as counting
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from pipelinerl.errors import AddressError

LOOPBACK: Final = "127.0.0.1"


def address_towards(host: str, port: int) -> str:
    """Return the address from which this machine connects to (`host`, `port`). Raises `OSError` without a route."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def outward_address() -> str:
    """Return the address by which other networks would reach this machine; loopback if there is no network."""
    try:
        return address_towards("192.0.2.1", 9)  # an address reserved for documentation; no packet is sent
    except OSError:
        return LOOPBACK


def address_facing(urls: Iterable[str]) -> str:
    """Return one address at which all servers at `urls` reach this machine; loopback if all servers are on it.

    If the servers are on several networks, the first remote server decides. Hosts that cannot be resolved are ignored.
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
    """Keep this thread from querying name servers; no-op without glibc, or if `host` is a name, not an address.

    torch's TCPStore looks up the peer's name for each connection, for a log line. If the name server does not answer,
    the C library waits for seconds: a group of 64 engines formed in 5.1 s, and in 0.1 s without the look-ups. torch
    then logs once per process that the name is unavailable.
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
    """Return a pointer to this thread's glibc resolver state: [0] seconds per query, [1] attempts; None elsewhere."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "__res_init")):
        return None
    library.__res_init()  # otherwise the first query would initialise the fields and overwrite our values
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return library.__res_state()


#: The ports given to services, below Linux's default range of outgoing ports (32768 and up).
_LISTENING: Final = range(20000, 32000)
#: Seconds within which a connection over loopback must be made.
_ANSWERS_S: Final = 2.0
#: Counter of the ports that this process has tried.
_LOOKED_AT: Final = counting()


def free_ports(count: int, host: str = LOOPBACK) -> tuple[int, ...]:
    """Return `count` different free ports of a local address, below the range of outgoing ports.

    A client that reconnects to a stopped service may get an outgoing port. If that were the service's port, the
    client would connect to itself, and the service could not bind the port again. Another program may take a port
    before its service binds it. Raises `AddressError` if too few ports are free, or 127.0.0.1 is unreachable.
    """
    if host == LOOPBACK:
        _check_loopback()
    found: list[int] = []
    for _ in _LISTENING:
        # The first port depends on the process, so that concurrent launchers try different ports. No port is tried
        # twice, since a port returned a moment ago may not be bound yet.
        port = _LISTENING[(os.getpid() * 37 + next(_LOOKED_AT)) % len(_LISTENING)]
        if is_free(port, host):
            found.append(port)
        if len(found) == count:
            return tuple(found)
    raise AddressError(f"fewer than {count} ports of {_LISTENING.start} to {_LISTENING.stop - 1} are free")


def _check_loopback() -> None:
    """Raise `AddressError` if the loopback interface is down, as in some containers: services would wait forever."""
    try:
        with socket.create_server((LOOPBACK, 0)) as service:
            socket.create_connection(service.getsockname(), _ANSWERS_S).close()
    except OSError as error:
        raise AddressError(
            f"programs cannot reach each other at 127.0.0.1 ({error.strerror or error}): the loopback interface is "
            "down, or something filters it; as root, `ip link set lo up` brings it up"
        ) from None


def family_of(host: str) -> socket.AddressFamily:
    """Return the address family of an address or a host name."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Return True if a service could bind this port of a local address now."""
    with socket.socket(family_of(host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


#: Device files of the drivers: NVIDIA's and AMD's, and Google's for TPUs.
_FILES: Final = (
    "dev/nvidia[0-9]*",
    "proc/driver/nvidia/gpus/*",
    "dev/dxg",
    "dev/kfd",
    "dev/accel[0-9]*",
    "dev/vfio/[0-9]*",
)


def has_accelerator(root: Path = Path("/")) -> bool:
    """Return True if driver files of a GPU or TPU exist below `root`, and `CUDA_VISIBLE_DEVICES` is not empty or -1."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(next(root.glob(pattern), None) is not None for pattern in _FILES)
