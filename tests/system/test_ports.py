"""A port that is offered can be listened on, and is not one that the kernel lends to those who connect."""

from __future__ import annotations

import socket

import pytest

from pipelinerl.errors import AddressError
from pipelinerl.system.ports import free_ports, is_free


def test_ports_are_different_free_and_below_those_of_outgoing_connections() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
    assert all(is_free(port) and port < 32768 for port in ports)


def test_one_that_is_taken_is_not_offered() -> None:
    (port,) = free_ports(1)
    with socket.create_server(("127.0.0.1", port)):
        assert not is_free(port)
        assert port not in free_ports(3)


def test_more_than_there_are_cannot_be_had() -> None:
    with pytest.raises(AddressError, match="fewer than 20000 ports"):
        free_ports(20000)
