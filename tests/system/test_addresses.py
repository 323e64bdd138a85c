"""The address by which others reach this machine, asked of its real routing table; and whose names nobody is asked."""

from __future__ import annotations

import ctypes
import socket
import threading

import pytest

from pipelinerl.system import addresses
from pipelinerl.system.addresses import LOOPBACK, address_facing, without_name_servers

#: Of a range that is for documentation: no host has it, but a machine with a network has a route there.
_ELSEWHERE = "198.51.100.7"
with_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__res_init"), reason="the C library is not glibc")


def test_who_is_on_this_machine_reaches_its_loopback() -> None:
    assert address_facing(["http://127.0.0.1:8001", "http://localhost:8002", "http://[::1]:8003"]) == LOOPBACK
    assert address_facing([]) == LOOPBACK


def test_one_engine_elsewhere_and_all_meet_at_the_outward_address(outward: str) -> None:
    assert address_facing(["http://127.0.0.1:8001", f"http://{_ELSEWHERE}:8001"]) == outward
    with socket.create_server((outward, 0)):  # it is an address of this machine
        pass


def test_an_engine_that_cannot_be_found_has_no_say() -> None:
    assert address_facing(["http://nowhere.invalid:8001", "http://127.0.0.1:8001"]) == LOOPBACK


def attempts() -> int:
    """How often this thread asks a name server."""
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return int(library.__res_state()[1])


@with_glibc
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "::1"])
def test_nothing_is_asked_within_and_as_much_as_before_afterwards(host: str) -> None:
    addresses._resolver()
    before = attempts()
    with pytest.raises(OSError, match="within"), without_name_servers(host):
        assert (before > 0, attempts()) == (True, 0)
        assert socket.getaddrinfo("localhost", 80), "files are read"
        raise OSError("within")
    assert attempts() == before


@with_glibc
def test_another_thread_asks_on() -> None:
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
def test_who_is_known_by_a_name_is_looked_up() -> None:
    addresses._resolver()
    with without_name_servers("trainer.lab"):
        assert attempts() > 0
