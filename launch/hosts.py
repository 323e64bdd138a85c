"""The hosts of a run as values: names, addresses, GPUs and roles, as the command line gives them.

    a                          the host a, which others reach by that name
    a=10.0.0.1:gpus=8          reached at that address; with eight GPUs
    b:gpus=0,roles=trainer     a host for the trainer alone; roles are engine, trainer and actor, joined by +

The first host is the head. It runs the streams, the controller, and every process that has no host of its own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from launch.devices import Devices, VisibleDevice
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError, UserError

#: Letters, digits, dots and dashes: the name is used in command lines, file names and host names.
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EXAMPLE: Final = "NAME, NAME=ADDRESS or NAME=ADDRESS:gpus=8,roles=engine+actor"


class HostRole(StrEnum):
    """A kind of process that a host may run. All other kinds run where the head or the trainer runs."""

    ENGINE = "engine"
    TRAINER = "trainer"
    ACTOR = "actor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """One machine of a run.

    Attributes:
        address: host name or IP address that its processes bind and others connect to.
        devices: GPUs that the run may use there; only their number is known, unless the host is this machine.
    """

    name: str
    address: str
    devices: Devices = field(default_factory=Devices)
    roles: frozenset[HostRole] = frozenset(HostRole)

    @property
    def word(self) -> str:
        """The argument of `--host` that describes this host."""
        return f"{self.name}={self.address}:gpus={len(self.devices)},roles={'+'.join(sorted(self.roles))}"

    def to_json(self) -> dict[str, Any]:
        """Return the host as a JSON table, for a file that other hosts read."""
        return {
            "name": self.name,
            "address": self.address,
            "gpus": len(self.devices),
            "roles": sorted(self.roles),
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Host:
        """Read the table that `to_json` returns. Raises KeyError, TypeError or ValueError for anything else."""
        roles = frozenset(HostRole(role) for role in fields["roles"])
        devices = numbered_devices(int(fields["gpus"]))
        return cls(name=str(fields["name"]), address=str(fields["address"]), devices=devices, roles=roles)


#: This machine by its loopback address: the only host of a run on one machine.
LOCALHOST: Final = Host(name="localhost", address="127.0.0.1")


def numbered_devices(count: int) -> Devices:
    """Return `count` GPUs of any machine, known only by their indices."""
    return Devices(tuple(VisibleDevice(str(index)) for index in range(count)))


def read_hosts(config: RunConfig, words: Sequence[str], *, count: int | None, gpus: int | None) -> tuple[Host, ...]:
    """Read the hosts that a command line names.

    Args:
        words: one argument per host, in the form above.
        count: the number of hosts, if they are not named; they are then called host-0, host-1, …
        gpus: GPUs of each host whose argument does not give their number.

    Raises:
        UserError: an argument has another form, two hosts share a name, or both words and a count are given.
        RecipeError: the recipe could use GPUs, and the number of a host's GPUs is not given.
    """
    if words and count is not None:
        raise UserError("pass --hosts N or --host for each host, not both")
    if count is not None and count < 1:
        raise UserError(f"--hosts must be 1 or above, got {count}")
    words = words or [f"host-{number}" for number in range(count or 0)]
    hosts = tuple(_read(word, gpus, may_use=bool(config.gpus_of_engine() or config.gpus_of_trainer)) for word in words)
    names = [host.name for host in hosts]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UserError(f"host names must be unique, got {twice[0]} twice")
    return hosts


def _read(word: str, gpus: int | None, *, may_use: bool) -> Host:
    where, _, rest = word.partition(":")
    name, _, address = where.partition("=")
    if not _NAME.fullmatch(name) or (address and not _NAME.fullmatch(address)):
        raise UserError(f"--host must be {_EXAMPLE}, got {word!r}")
    options = dict(_option(part, word) for part in rest.split(",")) if rest else {}
    given = options.get("gpus", gpus)
    if given is None and may_use:
        raise RecipeError(
            f"engines or trainer of this recipe may use GPUs, and the number of GPUs of {name} is not given; pass "
            f"--host {name}:gpus=8 (0 for none), or --gpus for all hosts"
        )
    try:
        roles = frozenset(HostRole(role) for role in options.get("roles", "+".join(HostRole)).split("+"))
        if (count := int(given or 0)) < 0:
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
