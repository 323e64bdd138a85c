"""Within it no question leaves this machine, in this thread alone; afterwards all is as before."""

from __future__ import annotations

import ctypes
import socket
import threading

import pytest

from pipelinerl.system import name_servers
from pipelinerl.system.name_servers import without_name_servers

pytestmark = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__res_init"), reason="the C library is not glibc")


def attempts() -> int:
    """How often this thread asks a name server."""
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return int(library.__res_state()[1])


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "::1"])
def test_nothing_is_asked_within_and_as_much_as_before_afterwards(host: str) -> None:
    name_servers._resolver()
    before = attempts()
    with pytest.raises(OSError, match="within"), without_name_servers(host):
        assert (before > 0, attempts()) == (True, 0)
        assert socket.getaddrinfo("localhost", 80), "files are read"
        raise OSError("within")
    assert attempts() == before


def test_another_thread_asks_on() -> None:
    found: list[int] = []

    def look() -> None:
        name_servers._resolver()
        found.append(attempts())

    with without_name_servers("127.0.0.1"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found[0] > 0


def test_who_is_known_by_a_name_is_looked_up() -> None:
    name_servers._resolver()
    with without_name_servers("trainer.lab"):
        assert attempts() > 0
