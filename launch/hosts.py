"""The hosts of a run as values: their names, addresses, GPUs, and what each may do; read from the command line.

    a                          the host a, which others reach by that name
    a=10.0.0.1:gpus=8          by that address; with eight GPUs
    b:gpus=0,roles=trainer     a host for the trainer alone; roles are engine, trainer and actor, joined by +

The first is the head: it runs the streams, the controller and what else has no host of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final

from launch.devices import Devices, VisibleDevice
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError, UserError

#: Letters, digits, dots, dashes: it is a word of a command line, of a file's name and of a host's.
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EXAMPLE: Final = "NAME, NAME=ADDRESS or NAME=ADDRESS:gpus=8,roles=engine+actor"


class HostRole(StrEnum):
    """What a host may be given to do; streams, controller and parameter servers go with the head."""

    ENGINE = "engine"
    TRAINER = "trainer"
    ACTOR = "actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of a run.

    Attributes:
        address: what others reach it by, and what its processes bind: a name or a number.
        devices: GPUs that the run may use there; on another machine than this one by number only.
    """

    name: str
    address: str
    devices: Devices = field(default_factory=Devices)
    roles: frozenset[HostRole] = frozenset(HostRole)

    @property
    def word(self) -> str:
        """The word of a command line that says the same."""
        return f"{self.name}={self.address}:gpus={len(self.devices)},roles={'+'.join(sorted(self.roles))}"

    def to_json(self) -> dict[str, Any]:
        """For a file that other hosts read."""
        return {
            "name": self.name,
            "address": self.address,
            "gpus": len(self.devices),
            "roles": sorted(self.roles),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Host:
        """Read what `to_json` gave. Raises KeyError, TypeError or ValueError for anything else."""
        roles = frozenset(HostRole(role) for role in fields["roles"])
        devices = numbered_devices(int(fields["gpus"]))
        return cls(name=str(fields["name"]), address=str(fields["address"]), devices=devices, roles=roles)


#: This machine, by its loopback: the host of a run that has only one.
LOCALHOST: Final = Host(name="localhost", address="127.0.0.1")


@dataclass(frozen=True, slots=True)
class HostAssignment:
    """Which host each process is on; one of which nothing is said is on the head."""

    hosts: tuple[Host, ...] = (LOCALHOST,)
    by_process: Mapping[str, str] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        """The first host."""
        return self.hosts[0]

    @property
    def are_several(self) -> bool:
        """Is the run on more than one machine?"""
        return len(self.hosts) > 1

    def of(self, process: str) -> Host:
        """The host of a process, by the process' name."""
        return self.named(self.by_process.get(process, self.head.name))

    def named(self, name: str) -> Host:
        """The host of that name.

        Raises:
            UserError: there is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise UserError(f"this run has no host {name!r}; its hosts are {', '.join(host.name for host in self.hosts)}")

    def knowing(self, name: str, devices: Devices) -> HostAssignment:
        """The same, with what the host of that name has found out about its own GPUs.

        Raises:
            UserError: it has fewer than the plan counts on.
        """
        planned = len(self.named(name).devices)
        if len(devices) < planned:
            raise UserError(
                f"the plan gives host {name} {planned} GPU{'s' if planned > 1 else ''}, and it has "
                f"{len(devices) or 'none'}; say --host {name}:gpus={len(devices)}, or start it on a host that has them"
            )
        own = Devices(devices.each[:planned], devices.origin)
        return replace(self, hosts=tuple(replace(h, devices=own) if h.name == name else h for h in self.hosts))


def numbered_devices(count: int) -> Devices:
    """That many GPUs of some machine, by number."""
    return Devices(tuple(VisibleDevice(str(index)) for index in range(count)))


def read_hosts(config: RunConfig, words: Sequence[str], *, count: int | None, gpus: int | None) -> tuple[Host, ...]:
    """The hosts that a command line names.

    Args:
        words: one for each host, as above. count: or only how many; they are called host-0, host-1, …
        gpus: of each host that does not say so itself.

    Raises:
        UserError: a word is not of that form, two hosts share a name, or there are both words and a count.
        RecipeError: the recipe could use GPUs, and nothing is said of how many a host has.
    """
    if words and count is not None:
        raise UserError("say --hosts N or --host for each host, not both")
    if count is not None and count < 1:
        raise UserError(f"--hosts must be 1 or above, got {count}")
    words = words or [f"host-{number}" for number in range(count or 0)]
    hosts = tuple(_read(word, gpus, may_use=bool(config.gpus_of_engine() or config.gpus_of_trainer)) for word in words)
    names = [host.name for host in hosts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"hosts must have names of their own, got {twice[0]} twice")
    return hosts


def _read(word: str, gpus: int | None, *, may_use: bool) -> Host:
    where, _, rest = word.partition(":")
    name, _, address = where.partition("=")
    if not _NAME.fullmatch(name) or (address and not _NAME.fullmatch(address)):
        raise UserError(f"--host must be {_EXAMPLE}, got {word!r}")
    options = dict(_option(part, word) for part in rest.split(",")) if rest else {}
    said = options.get("gpus", gpus)
    if said is None and may_use:
        raise RecipeError(
            f"engines or trainer of this recipe may use GPUs, and nothing says how many {name} has: say "
            f"--host {name}:gpus=8 (0 for none), or --gpus for all hosts"
        )
    try:
        roles = frozenset(HostRole(role) for role in options.get("roles", "+".join(HostRole)).split("+"))
        if (count := int(said or 0)) < 0:
            raise ValueError
        devices = numbered_devices(count)
    except ValueError:
        raise UserError(
            f"--host must be {_EXAMPLE}, with a number of gpus and roles of {', '.join(HostRole)}, got {word!r}"
        ) from None
    return Host(name=name, address=address or name, devices=devices, roles=roles)


def _option(part: str, word: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals or key not in ("gpus", "roles"):
        raise UserError(f"--host knows gpus and roles, such as {_EXAMPLE}; got {part!r} in {word!r}")
    return key, value
