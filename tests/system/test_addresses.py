"""Tests of the address at which other machines reach this one, from its real routing table; and of look-ups without
name servers.
"""

from __future__ import annotations

import ctypes
import socket
import threading

import pytest

from pipelinerl.system import addresses
from pipelinerl.system.addresses import LOOPBACK, address_facing, without_name_servers

#: An address reserved for documentation: no host has it, but machines with a network have a route to it.
_ELSEWHERE = "198.51.100.7"
with_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__res_init"), reason="the C library is not glibc")


def test_servers_on_this_machine_get_its_loopback_address() -> None:
    assert address_facing(["http://127.0.0.1:8001", "http://localhost:8002", "http://[::1]:8003"]) == LOOPBACK
    assert address_facing([]) == LOOPBACK


def test_one_remote_engine_makes_all_engines_use_the_outward_address(outward: str) -> None:
    assert address_facing(["http://127.0.0.1:8001", f"http://{_ELSEWHERE}:8001"]) == outward
    with socket.create_server((outward, 0)):  # works only if it is an address of this machine
        pass


def test_engine_whose_host_cannot_be_resolved_is_ignored() -> None:
    assert address_facing(["http://nowhere.invalid:8001", "http://127.0.0.1:8001"]) == LOOPBACK


def attempts() -> int:
    """Return how many attempts this thread's resolver makes per query."""
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return int(library.__res_state()[1])


@with_glibc
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "::1"])
def test_name_servers_are_not_asked_within_the_block_and_again_afterwards(host: str) -> None:
    addresses._resolver()
    before = attempts()
    with pytest.raises(OSError, match="within"), without_name_servers(host):
        assert (before > 0, attempts()) == (True, 0)
        assert socket.getaddrinfo("localhost", 80), "files are read"
        raise OSError("within")
    assert attempts() == before


@with_glibc
def test_other_threads_still_ask_name_servers() -> None:
    found: list[int] = []

    def look() -> None:
        addresses._resolver()
        found.append(attempts())

    with without_name_servers("127.0.0.1"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found[0] > 0


@with_glibc
def test_name_servers_are_still_asked_if_the_host_is_given_by_name() -> None:
    addresses._resolver()
    with without_name_servers("trainer.lab"):
        assert attempts() > 0
