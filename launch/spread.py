"""Which host each process of a run is on, and which of its GPUs it gets: pure, refused in a sentence if it cannot be.

One host is `placement`'s. On several, the trainer is on the first that has room for it, on its last GPUs, and a torch
trainer that no host has room for is spread over them, rank by rank. Engines fill the other hosts first, from their
first GPUs on; without GPUs they are dealt in turn. Actors and verifiers are dealt over the hosts with engines, and
parameter servers lie beside the trainer, whose uploads then stay on its host. No GPU is shared between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from launch.devices import Devices
from launch.hosts import Host, HostAssignment, HostRole
from launch.placement import TRAINER, Assignment, Placement, check_none_is_needed, check_uses, place
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError


def spread(config: RunConfig, hosts: Sequence[Host]) -> tuple[HostAssignment, Placement]:
    """The host of each process with which the run begins, and its GPUs there.

    Raises:
        RecipeError: the hosts have too few GPUs, or not the roles that the run needs.
    """
    if len(hosts) == 1:
        return HostAssignment(tuple(hosts)), place(config, hosts[0].devices)
    check_uses(config)
    if config.launch.engine_devices or config.launch.trainer_devices:
        raise RecipeError(
            "launch.engine_devices and launch.trainer_devices name the GPUs of one host, and the run has "
            f"{len(hosts)}; leave them out, and say how many each host has by --host NAME:gpus=8"
        )
    if not any(len(host.devices) for host in hosts):
        check_none_is_needed(config, Devices())
    dealer = _HostAllocator(config, hosts)
    trainers = dealer.place_trainer()
    engines = dealer.place_engines(after=trainers)
    dealer.deal("actor", config.actor.count, HostRole.ACTOR, first=engines)
    dealer.deal("verifier", config.verification.services, HostRole.ACTOR, first=engines)
    dealer.homes |= {f"parameter-server-{number}": trainers[0] for number in range(config.servers_to_start)}
    return HostAssignment(tuple(hosts), dealer.homes), Placement(hosts[0].devices, dealer.assignments)


@final
class _HostAllocator:
    """Hosts with the GPUs that are still free on each."""

    def __init__(self, config: RunConfig, hosts: Sequence[Host]) -> None:
        self._config = config
        self._hosts = hosts
        self._computing = any(len(host.devices) for host in hosts)
        self._free = {host.name: list(range(len(host.devices))) for host in hosts}
        self.homes: dict[str, str] = {}
        self.assignments: dict[str, Assignment] = {}

    def place_trainer(self) -> list[str]:
        """The trainer's processes; returns the hosts that they are on, rank 0's first."""
        config, able = self._config, self._able(HostRole.TRAINER)
        needs = config.gpus_of_trainer if self._computing else 0
        ranks = [TRAINER, *(f"{TRAINER}-rank-{rank}" for rank in range(1, config.trainer_processes))]
        roomy = [name for name in able if len(self._free[name]) >= needs]
        if roomy:
            self.homes |= dict.fromkeys(ranks, roomy[0])
            self._take(TRAINER, roomy[0], needs, config.trainer.memory_share, last=True)
            return [roomy[0]]
        if len(ranks) < needs or sum(len(self._free[name]) for name in able) < needs:
            raise RecipeError(self._too_few("the trainer", needs, "say more by --host NAME:gpus=8, or lower its mesh"))
        slots = [name for name in able for _ in self._free[name]]
        for rank, name in zip(ranks, slots, strict=False):
            self.homes[rank] = name
            self._take(rank, name, 1, config.trainer.memory_share)
        return list(dict.fromkeys(self.homes[rank] for rank in ranks))

    def place_engines(self, *, after: Sequence[str]) -> list[str]:
        """The engines, on hosts beside the trainer's first; returns the hosts that they are on."""
        config, able = self._config, self._able(HostRole.ENGINE)
        able = [name for name in able if name not in after] + [name for name in able if name in after]
        needs, count = config.gpus_of_engine() if self._computing else 0, config.engine.count
        if not needs:
            return self.deal("engine", count, HostRole.ENGINE, first=able)
        for number in range(count):
            roomy = [name for name in able if len(self._free[name]) >= needs]
            if not roomy:
                remedy = "say more by --host NAME:gpus=8, or lower engine.count or engine.devices"
                raise RecipeError(self._too_few(f"engine-{number} of {count}", needs, remedy))
            self.homes[f"engine-{number}"] = roomy[0]
            self._take(f"engine-{number}", roomy[0], needs, config.engine.memory_share)
        return list(dict.fromkeys(self.homes[f"engine-{number}"] for number in range(count)))

    def deal(self, kind: str, count: int, role: HostRole, *, first: Sequence[str]) -> list[str]:
        """`count` processes without GPUs in turn over the hosts that may; returns those that got some."""
        able = self._able(role)
        order = [name for name in first if name in able] or able
        self.homes |= {f"{kind}-{number}": order[number % len(order)] for number in range(count)}
        return order[:count]

    def _able(self, role: HostRole) -> list[str]:
        able = [host.name for host in self._hosts if role in host.roles]
        if not able:
            raise RecipeError(f"no host has the role {role}; say --host NAME:roles={role} for one of them, or no roles")
        return able

    def _take(self, process: str, host: str, count: int, share: float | None, *, last: bool = False) -> None:
        if count:
            free = self._free[host]
            taken = free[-count:] if last else free[:count]
            self._free[host] = [index for index in free if index not in taken]
            self.assignments[process] = Assignment(tuple(taken), share)

    def _too_few(self, who: str, needs: int, remedy: str) -> str:
        free = ", ".join(f"{name} {len(left) or 'none'}" for name, left in self._free.items())
        return f"{who} takes {needs} GPU{'s' if needs > 1 else ''} of one host, and free are: {free}; {remedy}"
