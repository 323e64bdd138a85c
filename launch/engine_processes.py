"""`EngineProcesses`: the processes of the engines that come and go while a run is live, as its controller wants them.

The controller says in its status whom it has requested and to_stop; it is asked all the time, and says the whole each
time, so that nothing is lost if either of the two is away for a while. The launcher owns the processes: they end with
it, however it ends. Of a run on several hosts they are on the head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from launch.device_pool import DevicePool
from launch.placement import Assignment
from launch.plan import Launch
from launch.supervisor import Supervisor
from pipelinerl.observability.status import RequestedEngine, RunStatus
from pipelinerl.system.ports import free_ports


@final
class EngineProcesses:
    """Makes the supervisor run what the status asks for.

    Args:
        give_up: tells the controller of an engine that cannot be had; called with each status until that says so, too.
    """

    def __init__(self, supervisor: Supervisor, launch: Launch, *, give_up: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._launch = launch
        self._give_up = give_up
        self._ports = set(launch.ports.all)
        self._devices = DevicePool(launch.config, launch.placement_of_head)

    def follow(self, status: RunStatus) -> None:
        """Start who is wanted and not there yet, stop who is to_stop."""
        for name in self._devices.holders & self._supervisor.ended:
            self._devices.give_back(name)
        for requested in status.fleet.requested:
            if requested.name in status.fleet.to_stop:
                continue
            if not self._supervisor.knows(requested.name):
                self._start(requested)
            elif requested.name in self._supervisor.spared:
                self._give_up(requested.name)
        for name in status.fleet.to_stop:
            self._supervisor.stop_engine(name)

    def _start(self, requested: RequestedEngine) -> None:
        """Start an engine on devices that are free; while others are being given back, wait for the next status."""
        on = self._devices.take(requested.name, type=requested.type)
        if on is None and self._devices.holders & self._supervisor.stopping:
            return
        spec = self._launch.engine(requested.name, port=self._port(), type=requested.type, on=on or Assignment())
        if on is None:
            self._supervisor.refuse(spec, self._devices.refusal(requested.name, type=requested.type))
        else:
            self._supervisor.add(spec)

    def _port(self) -> int:
        """A free one, also of those that were given to processes which have not bound theirs yet, or are down."""
        port = next(port for port in free_ports(len(self._ports) + 1) if port not in self._ports)
        self._ports.add(port)
        return port
