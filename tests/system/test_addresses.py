"""The address by which others reach this machine, asked of its real routing table."""

from __future__ import annotations

import socket

from pipelinerl.system.addresses import LOOPBACK, address_facing

#: Of a range that is for documentation: no host has it, but a machine with a network has a route there.
_ELSEWHERE = "198.51.100.7"


def test_who_is_on_this_machine_reaches_its_loopback() -> None:
    assert address_facing(["http://127.0.0.1:8001", "http://localhost:8002", "http://[::1]:8003"]) == LOOPBACK
    assert address_facing([]) == LOOPBACK


def test_one_engine_elsewhere_and_all_meet_at_the_outward_address(outward: str) -> None:
    assert address_facing(["http://127.0.0.1:8001", f"http://{_ELSEWHERE}:8001"]) == outward
    with socket.create_server((outward, 0)):  # it is an address of this machine
        pass


def test_an_engine_that_cannot_be_found_has_no_say() -> None:
    assert address_facing(["http://nowhere.invalid:8001", "http://127.0.0.1:8001"]) == LOOPBACK
