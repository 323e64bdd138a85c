"""Which address of this machine others reach it by: what faces them, as the routing table has it. No packet is sent."""

from __future__ import annotations

import socket
from collections.abc import Iterable
from ipaddress import ip_address
from typing import Final
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
