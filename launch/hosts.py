"""The hosts of a run as values: names, addresses, GPUs and roles, as the command line gives them.

    a                          the host a, which others reach by that name
    a=10.0.0.1:gpus=8          reached at that address; with eight GPUs
    b:gpus=0,roles=trainer     a host for the trainer alone; roles are engine, trainer and actor, joined by +

The first host is the head. It runs the streams, the controller, and every process that has no host of its own.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError, UserError

#: Letters, digits, dots and dashes: the name is used in command lines, file names and host names.
_NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_EXAMPLE: Final = "NAME, NAME=ADDRESS or NAME=ADDRESS:gpus=8,roles=engine+actor"


class HostRole(StrEnum):
    """A kind of process that a host may run; other kinds run on the trainer's host or on the head."""

    ENGINE = "engine"
    TRAINER = "trainer"
    ACTOR = "actor"


VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a run may use; recipes refer to a device by its index in this list.

    They are in the order of the PCI bus, unless they were `chosen_by_user` in CUDA_VISIBLE_DEVICES.
    """

    each: tuple[VisibleDevice, ...] = ()
    chosen_by_user: bool = False

    def __len__(self) -> int:
        return len(self.each)

    def label(self, index: int) -> str:
        """Return the device's name for messages, such as `GPU 1`, or `GPU 1 (MIG-…)` if CUDA names it differently."""
        name = self.each[index].name
        return f"GPU {index}" if name == str(index) else f"GPU {index} ({name})"

    def environment(self, indices: Sequence[int]) -> Mapping[str, str]:
        """Return the variables that make exactly the devices `indices` visible to a process; none without indices."""
        if not indices:
            return {}
        shown = {VARIABLE: ",".join(self.each[index].name for index in indices)}
        # By default CUDA counts the fastest GPU first, whereas `nvidia-smi` counts by PCI bus. Indices that the user
        # wrote in CUDA_VISIBLE_DEVICES keep the user's own order.
        return shown if self.chosen_by_user else shown | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


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
        """The argument of `--node` that describes this host."""
        return f"{self.name}={self.address}:gpus={len(self.devices)},roles={'+'.join(sorted(self.roles))}"

    def to_json(self) -> dict[str, Any]:
        """Return the host as a JSON table, for a file that other hosts read."""
        return {"name": self.name, "address": self.address, "gpus": len(self.devices), "roles": sorted(self.roles)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Host:
        """Read the table that `to_json` returns; raise KeyError, TypeError or ValueError for anything else."""
        roles = frozenset(HostRole(role) for role in fields["roles"])
        devices = numbered_devices(int(fields["gpus"]))
        return cls(name=str(fields["name"]), address=str(fields["address"]), devices=devices, roles=roles)


#: This machine by its loopback address: the only host of a run on one machine.
LOCALHOST: Final = Host(name="localhost", address="127.0.0.1")


def numbered_devices(count: int) -> Devices:
    """Return `count` GPUs that are known only by their indices, because the machine that has them is not this one."""
    return Devices(tuple(VisibleDevice(str(index)) for index in range(count)))


def read_hosts(config: RunConfig, words: Sequence[str], *, count: int | None, gpus: int | None) -> tuple[Host, ...]:
    """Read the hosts that a command line names.

    Args:
        words: one argument per host, in the form that the module's docstring describes.
        count: the number of hosts, if they are not named; they are then called host-0, host-1, …
        gpus: GPUs of each host whose argument does not give their number.

    Raises:
        UserError: an argument has another form, two hosts share a name, or both words and a count are given.
        RecipeError: the recipe could use GPUs, and the number of a host's GPUs is not given.
    """
    if words and count is not None:
        raise UserError("pass --nodes N or --node for each host, not both")
    if count is not None and count < 1:
        raise UserError(f"--nodes must be 1 or above, got {count}")
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
        raise UserError(f"--node must be {_EXAMPLE}, got {word!r}")
    options: dict[str, str] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if not equals or key not in ("gpus", "roles"):
            raise UserError(f"--node knows gpus and roles, such as {_EXAMPLE}; got {part!r} in {word!r}")
        options[key] = value
    given = options.get("gpus", gpus)
    if given is None and may_use:
        raise RecipeError(
            f"engines or trainer of this recipe may use GPUs, and the number of GPUs of {name} is not given; pass "
            f"--node {name}:gpus=8 (0 for none), or --gpus for all hosts"
        )
    try:
        roles = frozenset(HostRole(role) for role in options.get("roles", "+".join(HostRole)).split("+"))
        if (count := int(given or 0)) < 0:
            raise ValueError
        devices = numbered_devices(count)
    except ValueError:
        raise UserError(
            f"--node must be {_EXAMPLE}, with a number of gpus and roles of {', '.join(HostRole)}, got {word!r}"
        ) from None
    return Host(name=name, address=address or name, devices=devices, roles=roles)


#: Names of devices that CUDA accepts.
_DEVICE: Final = re.compile(r"\d+$|GPU-|MIG-")
#: Seconds for `nvidia-smi` to answer; without persistence mode it first wakes the GPUs, which takes seconds.
_DEADLINE_S: Final = 30.0
_QUERY: Final = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
_INSTANCES: Final = ("nvidia-smi", "-L")
_PROC: Final = Path("/proc/driver/nvidia/gpus")


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A GPU, or one MIG instance of a GPU: its name in CUDA_VISIBLE_DEVICES, and its memory if known."""

    name: str
    memory_mib: int | None = None


def devices_for(config: RunConfig, environ: Mapping[str, str]) -> Devices:
    """Return the devices that the run may use, none if it uses no GPU; `UserError` if they cannot be determined."""
    if not (config.gpus_of_engine() or config.gpus_of_trainer):
        return Devices()
    try:
        gpus = _answer(_QUERY)
        instances = _answer(_INSTANCES) if "Enabled" in gpus else ""
    except FileNotFoundError:
        gpus, instances = "\n".join(_from_proc(_PROC)), ""
    return read_devices(gpus, instances=instances, visible=environ.get(VARIABLE))


def read_devices(gpus: str, *, instances: str = "", visible: str | None = None) -> Devices:
    """Parse the output of `nvidia-smi`.

    Args:
        gpus: a line per GPU: index, UUID, memory in MiB, MIG mode.
        instances: output of `nvidia-smi -L` if a GPU is divided (MIG); its instances then replace the GPU in the list.
        visible: CUDA_VISIBLE_DEVICES, whose names become the devices' names; None if the variable is not set.

    Raises:
        UserError: `visible` names a device that does not exist.
    """
    rows = [[field.strip() for field in line.split(",")] for line in gpus.splitlines() if line.strip()]
    if visible is not None:
        return Devices(tuple(_named(rows, visible)) if rows else (), chosen_by_user=True)
    devices: list[VisibleDevice] = []
    for index, uuid, memory, mig in rows:
        if mig == "Enabled":
            devices += [VisibleDevice(name) for name in _instances_of(uuid, instances)]
        else:
            devices.append(VisibleDevice(index, _mebibytes(memory)))
    return Devices(tuple(devices))


def _named(rows: list[list[str]], visible: str) -> Iterator[VisibleDevice]:
    """Yield the devices that CUDA_VISIBLE_DEVICES names; like CUDA, stop at the first word that is no device name."""
    sizes = {row[2] for row in rows}
    for name in takewhile(_DEVICE.match, (part.strip() for part in visible.split(","))):
        if name.startswith("MIG-"):
            yield VisibleDevice(name)
            continue
        if name.isdecimal():
            # CUDA_DEVICE_ORDER decides which GPU an index means, so memory is known only if all GPUs have equal memory.
            same = [row for row in rows if len(sizes) == 1 and row[3] != "Enabled"] if int(name) < len(rows) else None
        else:
            same = [row for row in rows if row[1].startswith(name)] or None
        if same is None:
            there = ", ".join(f"{row[0]} ({row[1]})" for row in rows)
            raise UserError(f"{VARIABLE} names {name}, and this machine has the GPUs {there}; correct the variable")
        yield VisibleDevice(name, _mebibytes(same[0][2]) if same else None)


def _instances_of(uuid: str, listing: str) -> list[str]:
    names: list[str] = []
    inside = False
    for line in listing.splitlines():
        if line.startswith("GPU "):
            inside = uuid in line
        elif inside and (name := re.search(r"UUID: (MIG-[^)]+)", line)):
            names.append(name[1])
    return names


def _mebibytes(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _answer(command: Sequence[str]) -> str:
    """Return the command's output; empty if the command fails, as it does without a driver or a GPU."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_S)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"{command[0]} did not answer within {_DEADLINE_S:g} s, so which GPUs there are is unknown; see why it "
            "hangs, or set engine.device and trainer.device to cpu"
        ) from None
    return done.stdout if done.returncode == 0 else ""


def _from_proc(gpus: Path) -> Iterator[str]:
    """Yield a line per GPU like `nvidia-smi`, from the driver's files; without memory sizes and MIG instances."""
    folders = sorted(gpus.iterdir()) if gpus.is_dir() else []
    for index, folder in enumerate(folders):  # each folder is named after the PCI address of its GPU
        uuid = re.search(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
        yield f"{index}, {uuid[1] if uuid else ''}, , "
