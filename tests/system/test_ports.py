"""Tests that returned ports can be bound, and lie outside the range of outgoing ports."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from pipelinerl.errors import AddressError
from pipelinerl.system.ports import free_ports, is_free
from tests.patience import SOON_S


def test_returned_ports_are_different_free_and_below_outgoing_ports() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) and port < 32768 for port in ports)


def test_port_that_is_taken_is_not_returned() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        assert port not in free_ports(3)


def test_port_taken_at_one_address_is_free_at_another() -> None:
    (port,) = free_ports(1, "127.0.0.2")
    with socket.create_server(("127.0.0.2", port)):
        assert is_free(port) and not is_free(port, "127.0.0.2")


def test_requesting_more_ports_than_are_free_is_an_error() -> None:
    with pytest.raises(AddressError, match="fewer than 20000 ports"):
        free_ports(20000)


#: An ordinary user may become root in a new network namespace, in which no interface is up.
_APART = ("unshare", "--map-root-user", "--net")
_ASK = "from pipelinerl.system.ports import free_ports; free_ports(1)"


def test_missing_loopback_is_reported_at_once() -> None:
    """Regression: the launcher waited a minute for an unreachable server."""
    if shutil.which("unshare") is None or subprocess.run([*_APART, "true"], capture_output=True).returncode:
        pytest.skip("left out: a network namespace, which may not be made here")
    done = subprocess.run([*_APART, sys.executable, "-c", _ASK], capture_output=True, text=True, timeout=SOON_S)
    assert "AddressError: programs cannot reach each other at 127.0.0.1 (" in done.stderr
