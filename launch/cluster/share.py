"""What one host of a run is told: the launch as it sees it, with its own cores and GPUs."""

from __future__ import annotations

import os

from launch.cluster.membership import Members
from launch.devices import devices_for
from launch.hosts import HostAssignment
from launch.placement import Placement
from launch.plan import Launch, Ports
from launch.run_directory import RunDirectory
from launch.spread import spread


def launch_on(members: Members, host: str, directory: RunDirectory) -> Launch:
    """The launch of a run on several hosts, seen from `host`, which is this machine.

    Raises:
        UserError: no such host is among them, or this machine has fewer GPUs than the plan gives to it.
    """
    config = directory.config
    homes, placement = spread(config, members.hosts)
    homes = homes.knowing(host, devices_for(config, os.environ))
    ports = Ports.of(config, range(members.first_port, members.first_port + Ports.count(config)))
    own = Placement(homes.head.devices, placement.assignments)
    return launch_in(directory, homes, own, ports)


def launch_in(directory: RunDirectory, homes: HostAssignment, placement: Placement, ports: Ports) -> Launch:
    """A launch of the run in that directory, on this machine's cores."""
    return Launch(
        config=directory.config,
        run_dir=directory.path,
        ports=ports,
        token_file=directory.tokens,
        cores=sorted(os.sched_getaffinity(0)),
        placement=placement,
        homes=homes,
    )
