"""`Staff`: the processes of the engines that come and go while a run is live, as its controller wants them.

The controller says in its status whom it has hired and dismissed; it is asked all the time, and says the whole each
time, so that nothing is lost if either of the two is away for a while. The launcher owns the processes: they end with
it, however it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from launch.local import Supervisor
from launch.plan import Launch
from launch.ports import free_ports
from pipelinerl.observability.status import RunStatus


@final
class Staff:
    """Makes the supervisor run what the status asks for.

    Args:
        give_up: tells the controller of an engine that cannot be had; called with each status until that says so, too.
    """

    def __init__(self, supervisor: Supervisor, launch: Launch, *, give_up: Callable[[str], None]) -> None:
        self._supervisor = supervisor
        self._launch = launch
        self._give_up = give_up
        self._ports = set(launch.ports.all)

    def follow(self, status: RunStatus) -> None:
        """Start who is wanted and not there yet, stop who is dismissed."""
        for hired in status.hired:
            if hired.name in status.dismissed:
                continue
            if not self._supervisor.knows(hired.name):
                self._supervisor.add(self._launch.engine(hired.name, port=self._port(), type=hired.type))
            elif hired.name in self._supervisor.spared:
                self._give_up(hired.name)
        for name in status.dismissed:
            self._supervisor.dismiss(name)

    def _port(self) -> int:
        """A free one, also of those that were given to processes which have not bound theirs yet, or are down."""
        port = next(port for port in free_ports(len(self._ports) + 1) if port not in self._ports)
        self._ports.add(port)
        return port
