"""`EngineProcesses`: starts and stops engines of a live run as its controller requests, and assigns devices to them.

The controller's status always lists all requested engines and all engines to stop, so no request is lost while the
controller or the launcher is down. The launcher owns the engines' processes, which end with it. In a run on several
hosts, requested engines run on the head.

Processes share a device only if their memory shares allow it; a process without a share has its devices to itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from launch.placement import ROUNDING, Assignment
from launch.plan import Launch
from launch.supervisor import Supervisor
from pipelinerl.observability.status import RequestedEngine, RunStatus
from pipelinerl.system.machine import free_ports


@final
class EngineProcesses:
    """Makes the supervisor run the engines that were requested of the live run.

    Args:
        give_up: tells the controller that an engine cannot start; called for each status that still requests it.
    """

    def __init__(self, supervisor: Supervisor, launch: Launch, *, give_up: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._launch = launch
        self._give_up = give_up
        placement = launch.placement
        self._ports = set(launch.ports.values())
        self._devices = placement.head.devices
        self._held = {
            name: on for name, on in placement.assignments.items() if placement.host_of(name) is placement.head
        }

    def follow(self, status: RunStatus) -> None:
        """Start engines that are requested but do not run yet, and stop engines that the status lists to be stopped."""
        for name in self._held.keys() & self._supervisor.ended:
            del self._held[name]
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
        """Start an engine on free devices. If none are free but a process is stopping, wait for the next status."""
        on = self._take_devices(requested)
        if on is None and self._held.keys() & self._supervisor.stopping:
            return
        spec = self._launch.engine(requested.name, port=self._port(), type=requested.type, on=on or Assignment())
        if on is None:
            self._supervisor.refuse(spec, self._refusal(requested))
        else:
            self._supervisor.add(spec)

    def _port(self) -> int:
        """Return a free port that no process of the run was given: even a process that is down will bind its port
        again.
        """
        port = next(port for port in free_ports(len(self._ports) + 1) if port not in self._ports)
        self._ports.add(port)
        return port

    def _take_devices(self, requested: RequestedEngine) -> Assignment | None:
        """Return devices for an engine, the least used first; None if too few are free. Empty if the engine needs no
        device.
        """
        config = self._launch.config
        needs = config.gpus_of_engine(requested.type) if self._devices.each else 0
        if not needs:
            return Assignment()
        share = config.engine.memory_share
        wanted = share if share is not None and config.weights.backend != "nccl" else 1.0
        used = [self._used(index) for index in range(len(self._devices))]
        fitting = [index for index in range(len(used)) if used[index] + wanted <= 1.0 + ROUNDING]
        chosen = sorted(sorted(fitting, key=lambda index: used[index])[:needs])
        if len(chosen) < needs:
            return None
        self._held[requested.name] = Assignment(tuple(chosen), share)
        return self._held[requested.name]

    def _used(self, index: int) -> float:
        """Return the assigned fraction of a device's memory."""
        return sum(1.0 if each.share is None else each.share for each in self._held.values() if index in each.indices)

    def _refusal(self, requested: RequestedEngine) -> str:
        """Return why an engine gets no devices, and how to free some."""
        needs = self._launch.config.gpus_of_engine(requested.type)
        holders = [
            (self._devices.label(i), ", ".join(name for name, on in self._held.items() if i in on.indices) or "free")
            for i in range(len(self._devices))
        ]
        state = "; ".join(f"{label}: {names}" for label, names in holders)
        return (
            f"{requested.name} takes {needs} GPU{'s' if needs > 1 else ''}, and too few are free ({state}); take an "
            "engine out first, or start the run with an engine.memory_share and a trainer.memory_share that leave room "
            "for another"
        )
