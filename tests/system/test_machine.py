"""The address at which other machines reach this machine, free ports, and host look-ups without name servers."""

import ctypes
import shutil
import socket
import subprocess
import sys
import threading

import pytest

from pipelinerl.errors import AddressError
from pipelinerl.system import machine
from pipelinerl.system.machine import LOOPBACK, address_facing, free_ports, is_free, without_name_servers
from tests.patience import SOON_S

#: An address reserved for documentation: no host has it, but machines with a network have a route to it.
_ELSEWHERE = "198.51.100.7"
with_glibc = pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "__res_init"), reason="the C library is not glibc")


def test_loopback_address_is_chosen_if_all_servers_are_on_this_machine():
    assert address_facing(["http://127.0.0.1:8001", "http://localhost:8002", "http://[::1]:8003"]) == LOOPBACK
    assert address_facing([]) == LOOPBACK


def test_externally_reachable_address_is_chosen_if_at_least_one_server_is_on_another_machine(outward):
    assert address_facing(["http://127.0.0.1:8001", f"http://{_ELSEWHERE}:8001"]) == outward
    with socket.create_server((outward, 0)):  # binding succeeds only if `outward` is an address of this machine
        pass


def attempts():
    """Return how often this thread's resolver asks name servers per query; 0 if name servers are disabled."""
    library = ctypes.CDLL(None)
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return int(library.__res_state()[1])


@with_glibc
@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1", "::1"])
def test_dns_lookups_are_disabled_inside_the_block_of_without_name_servers_and_enabled_afterwards(host):
    machine._resolver()
    before = attempts()
    with pytest.raises(OSError, match="within"), without_name_servers(host):
        assert (before > 0, attempts()) == (True, 0)
        assert socket.getaddrinfo("localhost", 80), "files are read"
        raise OSError("within")
    assert attempts() == before


@with_glibc
def test_dns_lookups_of_other_threads_stay_enabled_inside_the_block_of_without_name_servers():
    counts = []

    def look():
        machine._resolver()
        counts.append(attempts())

    with without_name_servers("127.0.0.1"):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert counts[0] > 0


def test_free_ports_are_distinct_unused_and_below_the_range_for_outgoing_connections():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) and port < 32768 for port in ports)
    with socket.create_server(("127.0.0.1", ports[0])):
        assert not is_free(ports[0])
    with pytest.raises(AddressError, match="fewer than 20000 ports"):
        free_ports(20000)


#: A command that runs a program in a new network namespace, in which no network interface is up, not even loopback.
_APART = ("unshare", "--map-root-user", "--net")
_ASK = "from pipelinerl.system.machine import free_ports; free_ports(1)"


def test_missing_loopback_interface_is_reported_without_waiting():
    """Otherwise the launcher would wait a minute for an unreachable server."""
    if shutil.which("unshare") is None or subprocess.run([*_APART, "true"], capture_output=True).returncode:
        pytest.skip("left out: a network namespace, which may not be made here")
    done = subprocess.run([*_APART, sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=SOON_S)
    assert "AddressError: programs cannot reach each other at 127.0.0.1 (" in done.stderr
