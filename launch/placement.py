"""The placement of each process of a run: its host, its devices, and its share of their memory. Pure.

On one host with enough devices, each engine gets devices of its own, from the first on, and the trainer gets the
last devices. If the host has a single device, all processes share it. With several devices, processes share a device
only if `launch.engine_devices` and `launch.trainer_devices` say so. Processes on a shared device get shares of its
memory. Shares that the recipe does not set are chosen so that a tenth of the memory stays free for CUDA's contexts and
libraries.

On several hosts (`spread`), the trainer is on the first host with room for it, on its last GPUs. A torch trainer that
fits on no host is spread over them, rank by rank. Engines fill the hosts without the trainer first, and on each host
the first GPUs first; engines without GPUs are assigned to hosts in turn. Actors and verifiers are assigned in turn to
hosts with engines. Parameter servers are on the trainer's host, so uploads stay there. No GPU is shared.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from launch.hosts import LOCALHOST, Devices, Host, HostRole
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError, UserError

TRAINER: Final = "trainer"

#: Fraction of a shared device's memory that its processes get together, if the recipe does not set every share.
_GIVEN_OUT: Final = 0.9
#: Fraction of a device's memory that the trainer gets if it shares the device with engines.
_TRAINERS: Final = 0.45
#: Tolerance for comparing sums of shares, because decimal fractions are not exact in binary.
ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Assignment:
    """A process's devices, by index, and the `share` of each device's memory that the process may use (None: all)."""

    indices: tuple[int, ...] = ()
    share: float | None = None

    @property
    def gpus(self) -> float:
        return len(self.indices) * (1.0 if self.share is None else self.share)


@dataclass(frozen=True, slots=True)
class Placement:
    """The hosts and devices of the processes of a run.

    Attributes:
        hosts: the hosts of the run; the first is the head.
        host_by_process: the host of each process, by name; a process that is not listed runs on the head.
        assignments: the devices of each process that uses some, by name.
    """

    hosts: tuple[Host, ...] = (LOCALHOST,)
    host_by_process: Mapping[str, str] = field(default_factory=dict)
    assignments: Mapping[str, Assignment] = field(default_factory=dict)

    @property
    def head(self) -> Host:
        return self.hosts[0]

    def of(self, process: str) -> Assignment:
        """Return the devices of a process; an empty `Assignment` if the process uses none."""
        return self.assignments.get(process, Assignment())

    def host_of(self, process: str) -> Host:
        return self.host(self.host_by_process.get(process, self.head.name))

    def host(self, name: str) -> Host:
        """Return the host of that name; raise `UserError` if there is none."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise UserError(f"this run has no host {name!r}; its hosts are {', '.join(host.name for host in self.hosts)}")

    def knowing(self, name: str, devices: Devices) -> Placement:
        """Return the placement with the devices that host `name` detected; raise `UserError` if they are too few."""
        planned = len(self.host(name).devices)
        if len(devices) < planned:
            raise UserError(
                f"the plan gives host {name} {planned} GPU{'s' if planned > 1 else ''}, and it has "
                f"{len(devices) or 'none'}; pass --node {name}:gpus={len(devices)}, or use a host that has them"
            )
        own = Devices(devices.each[:planned], devices.chosen_by_user)
        return replace(self, hosts=tuple(replace(h, devices=own) if h.name == name else h for h in self.hosts))

    def bytes_of(self, name: str) -> int | None:
        """Return the bytes that a process may use on each of its devices; None if it has none, or if unknown."""
        assignment, devices = self.of(name), self.host_of(name).devices
        sizes = [devices.each[index].memory_mib for index in assignment.indices]
        known = [size for size in sizes if size is not None]
        return int(min(known) * 2**20 * (assignment.share or 1.0)) if known and len(known) == len(sizes) else None

    def describe(self) -> str:
        """Describe in one line which process has which devices, in a run on one host."""
        if not self.assignments:
            return "everything computes on the CPU"
        devices = self.head.devices
        users = Counter(index for each in self.assignments.values() for index in each.indices)
        shared = sorted(index for index, count in users.items() if count > 1)
        unused = [index for index in range(len(devices)) if index not in users]
        places = []
        for name, each in self.assignments.items():
            place = " + ".join(map(devices.label, each.indices))
            if each.share is not None:
                memory = devices.each[each.indices[0]].memory_mib
                much = "" if memory is None else f", {each.share * memory / 1024:.1f} GiB"
                place += f" ({each.share:g} of its memory{much})"
            places.append(f"{name} on {place}")
        parts = [", ".join(places)]
        parts += [f"shared: {', '.join(map(devices.label, shared))}"] if shared else []
        parts += [f"free: {', '.join(map(devices.label, unused))}"] if unused else []
        return "; ".join(parts)


def place(config: RunConfig, devices: Devices) -> Placement:
    """Return the placement of a run on one host's devices; raise `RecipeError` if the recipe does not fit on them."""
    check_uses(config)
    here = (replace(LOCALHOST, devices=devices),)
    if not devices.each:
        check_none_is_needed(config, devices)
        return Placement(here)
    _check_counts(config, devices)
    named = {index for _, indices in _explicit(config) for index in indices}
    free = [index for index in range(len(devices)) if index not in named]
    each, trainers = config.gpus_of_engine(), config.gpus_of_trainer
    engines = 0 if config.launch.engine_devices else config.engine.count * each
    trainer = 0 if config.launch.trainer_devices else trainers
    if engines + trainer > len(free):
        if len(devices) > 1 or max(each, trainers) > 1:
            raise RecipeError(_too_few(config, devices, engines=engines, trainer=trainer, free=len(free)))
        free = [0] * (engines + trainer)
    of_engines: Sequence[tuple[int, ...]] = config.launch.engine_devices
    if engines:
        of_engines = [tuple(free[start : start + each]) for start in range(0, engines, each)]
    of_trainer = config.launch.trainer_devices or tuple(free[len(free) - trainer :])
    indices_by_name = {f"engine-{number}": indices for number, indices in enumerate(of_engines)}
    indices = indices_by_name | ({TRAINER: of_trainer} if of_trainer else {})
    shares = _shares(config, indices, devices)
    if config.weights.backend == "nccl":
        for index in range(len(devices)):
            if len(together := [name for name in indices if index in indices[name]]) > 1:
                raise RecipeError(
                    'weights.backend = "nccl" needs a GPU for each engine and for the trainer, and '
                    f"{devices.label(index)} is shared by {' and '.join(together)}; give each its own GPU, or use gloo"
                )
    return Placement(here, assignments={name: Assignment(indices[name], shares[name]) for name in indices})


def check_uses(config: RunConfig) -> None:
    """Raise `RecipeError` if the recipe sets devices or memory shares for roles that never use a GPU."""
    engine, trainer, launch = config.engine, config.trainer, config.launch
    roles = (
        ("engine", engine, config.gpus_of_engine(), launch.engine_devices),
        ("trainer", trainer, config.gpus_of_trainer, launch.trainer_devices),
    )
    for role, section, needs, devices in roles:
        if needs:
            continue
        why = f"{role}.device is cpu" if section.device == "cpu" else f"{role}.type {section.type} uses no GPU"
        if devices:
            raise RecipeError(f"launch.{role}_devices: {why}; remove it")
        if section.memory_share is not None:
            raise RecipeError(f"{role}.memory_share limits GPU memory, and {why}; remove it")


def _check_counts(config: RunConfig, devices: Devices) -> None:
    named = config.launch.engine_devices
    if named and len(named) != config.engine.count:
        raise RecipeError(
            f"launch.engine_devices must be a list for each of the {config.engine.count} engines, got {len(named)}; "
            "such as [[0], [1]] for two"
        )
    takes = {"launch.engine_devices": ("each engine", config.gpus_of_engine(), "engine.devices")}
    takes["launch.trainer_devices"] = ("the trainer", config.gpus_of_trainer, "its mesh")
    for key, indices in _explicit(config):
        who, needs, because = takes[key]
        if len(set(indices)) != needs or len(indices) != needs:
            raise RecipeError(
                f"{key}: {who} takes {needs} different devices according to {because}, got {list(indices)}"
            )
        if beyond := [index for index in indices if index >= len(devices)]:
            raise RecipeError(f"{key} names device {beyond[0]}, and there {_there(devices)}; devices count from 0")


def check_none_is_needed(config: RunConfig, devices: Devices) -> None:
    """Raise `RecipeError` if the recipe names GPUs or sets a device to `cuda`; called where there is no GPU."""
    keys = list(dict.fromkeys(key for key, _ in _explicit(config)))
    for role, section, needs in (
        ("engine", config.engine, config.gpus_of_engine()),
        ("trainer", config.trainer, config.gpus_of_trainer),
    ):
        keys += [f"{role}.device=cuda"] if section.device == "cuda" and needs else []
    if keys:
        raise RecipeError(
            f"{' and '.join(keys)} require GPUs, and there {_there(devices)}; remove {'them' if keys[1:] else 'it'}"
        )


def _explicit(config: RunConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for indices in config.launch.engine_devices:
        yield "launch.engine_devices", indices
    if config.launch.trainer_devices:
        yield "launch.trainer_devices", config.launch.trainer_devices


def _too_few(config: RunConfig, devices: Devices, *, engines: int, trainer: int, free: int) -> str:
    count, each, wanted = config.engine.count, config.gpus_of_engine(), engines + trainer
    words = [f"{each} for each of {count} engines" if count > 1 else f"{each} for the engine"] if engines else []
    words += [f"{trainer} for the trainer"] if trainer else []
    left = "" if free == len(devices) else f", of which the recipe leaves them {free or 'none'}"
    lower = [key for key, value in (("engine.count", count), ("engine.devices", each)) if engines and value > 1]
    remedies = [f"lower {' or '.join(lower)}"] if lower else []
    if len(devices) >= max(each, config.gpus_of_trainer):
        remedies.append(
            "name the devices, which may then be shared, in launch.engine_devices and launch.trainer_devices"
        )
    remedies.append("set engine.device=cpu or trainer.device=cpu")
    needed = f"{wanted} GPU{'s are' if wanted > 1 else ' is'} needed, {' and '.join(words)}"
    return f"{needed}, and there {_there(devices)}{left}; {', or '.join(remedies)}"


def _there(devices: Devices) -> str:
    count = len(devices)
    where = ", as CUDA_VISIBLE_DEVICES says" if devices.chosen_by_user else ""
    return (f"is {count or 'none'}" if count < 2 else f"are {count}") + where


def _shares(config: RunConfig, indices: Mapping[str, tuple[int, ...]], devices: Devices) -> dict[str, float | None]:
    """Return the share of its devices' memory that each process may use; None means all of it."""
    sections = {name: config.trainer if name == TRAINER else config.engine for name in indices}
    requested = {name: section.memory_share for name, section in sections.items()}
    shares = dict(requested)
    for index in range(len(devices)):
        here = [name for name in indices if index in indices[name]]
        if len(here) > 1:
            for name, share in _divided(here, requested, label=devices.label(index)).items():
                before = shares[name]
                shares[name] = share if before is None else min(before, share)
    return shares


def _divided(here: Sequence[str], requested: Mapping[str, float | None], *, label: str) -> dict[str, float]:
    """Divide one device's memory among the processes `here`; return each process's share.

    Shares that the recipe sets (`requested`) are kept. Of the rest, a trainer without a set share gets at most
    `_TRAINERS` (everything if no engine needs a part), and engines without a set share get equal parts.
    """
    stated = {name: share for name in here if (share := requested[name]) is not None}
    still_open = [name for name in here if name not in stated]
    left = (_GIVEN_OUT if still_open else 1.0) - sum(stated.values())
    if left < -ROUNDING or (still_open and left < ROUNDING):
        shares = " and ".join(f"{name} {share:g}" for name, share in stated.items())
        none = f", which leaves nothing for {' and '.join(still_open)}" if still_open else ", more than all of it"
        raise RecipeError(
            f"shares of the memory of {label} are {shares}{none}; lower engine.memory_share or trainer.memory_share"
        )
    engines = [name for name in still_open if name != TRAINER]
    of_trainer = 0.0
    if TRAINER in still_open:
        of_trainer = min(left, _TRAINERS) if engines else left
    divided = stated | {name: (left - of_trainer) / len(engines) for name in engines}
    divided |= {TRAINER: of_trainer} if TRAINER in still_open else {}
    return {
        name: share if name in stated else math.floor(share * 1000 + ROUNDING) / 1000 for name, share in divided.items()
    }


def spread(config: RunConfig, hosts: Sequence[Host]) -> Placement:
    """Return each process's host and its GPUs there; raise `RecipeError` if the hosts lack GPUs or a needed role."""
    if len(hosts) == 1:
        return replace(place(config, hosts[0].devices), hosts=tuple(hosts))
    check_uses(config)
    if config.launch.engine_devices or config.launch.trainer_devices:
        raise RecipeError(
            "launch.engine_devices and launch.trainer_devices name the GPUs of one host, and the run has "
            f"{len(hosts)}; remove them, and pass the number of each host with --node NAME:gpus=8"
        )
    if not any(len(host.devices) for host in hosts):
        check_none_is_needed(config, Devices())
    allocator = _HostAllocator(config, hosts)
    trainers = allocator.place_trainer()
    engines = allocator.place_engines(after=trainers)
    allocator.assign_in_turn("actor", config.actor.count, HostRole.ACTOR, first=engines)
    allocator.assign_in_turn("verifier", config.verification.services, HostRole.ACTOR, first=engines)
    allocator.host_by_process |= {
        f"parameter-server-{number}": trainers[0] for number in range(config.servers_to_start)
    }
    return Placement(tuple(hosts), allocator.host_by_process, allocator.assignments)


class _HostAllocator:
    """The free GPUs of each host, and the assignments made so far."""

    def __init__(self, config: RunConfig, hosts: Sequence[Host]) -> None:
        self._config = config
        self._hosts = hosts
        self._computing = any(len(host.devices) for host in hosts)
        self._free = {host.name: list(range(len(host.devices))) for host in hosts}
        self.host_by_process: dict[str, str] = {}
        self.assignments: dict[str, Assignment] = {}

    def place_trainer(self) -> list[str]:
        """Assign hosts to the trainer's processes; return these hosts' names, rank 0's host first."""
        config, able = self._config, self._able(HostRole.TRAINER)
        needs = config.gpus_of_trainer if self._computing else 0
        ranks = [TRAINER, *(f"{TRAINER}-rank-{rank}" for rank in range(1, config.trainer_processes))]
        roomy = [name for name in able if len(self._free[name]) >= needs]
        if roomy:
            self.host_by_process |= dict.fromkeys(ranks, roomy[0])
            self._take(TRAINER, roomy[0], needs, config.trainer.memory_share, last=True)
            return [roomy[0]]
        if len(ranks) < needs or sum(len(self._free[name]) for name in able) < needs:
            raise RecipeError(
                self._too_few("the trainer", needs, "add some with --node NAME:gpus=8, or lower its mesh")
            )
        slots = [name for name in able for _ in self._free[name]]
        for rank, name in zip(ranks, slots, strict=False):
            self.host_by_process[rank] = name
            self._take(rank, name, 1, config.trainer.memory_share)
        return list(dict.fromkeys(self.host_by_process[rank] for rank in ranks))

    def place_engines(self, *, after: Sequence[str]) -> list[str]:
        """Assign hosts to the engines, the trainer's hosts (`after`) last; return the names of the chosen hosts."""
        config, able = self._config, self._able(HostRole.ENGINE)
        able = [name for name in able if name not in after] + [name for name in able if name in after]
        needs, count = config.gpus_of_engine() if self._computing else 0, config.engine.count
        if not needs:
            return self.assign_in_turn("engine", count, HostRole.ENGINE, first=able)
        for number in range(count):
            roomy = [name for name in able if len(self._free[name]) >= needs]
            if not roomy:
                remedy = "add some with --node NAME:gpus=8, or lower engine.count or engine.devices"
                raise RecipeError(self._too_few(f"engine-{number} of {count}", needs, remedy))
            self.host_by_process[f"engine-{number}"] = roomy[0]
            self._take(f"engine-{number}", roomy[0], needs, config.engine.memory_share)
        return list(dict.fromkeys(self.host_by_process[f"engine-{number}"] for number in range(count)))

    def assign_in_turn(self, kind: str, count: int, role: HostRole, *, first: Sequence[str]) -> list[str]:
        """Assign `count` processes in turn to hosts with the role, preferably those in `first`; return their names."""
        able = self._able(role)
        order = [name for name in first if name in able] or able
        self.host_by_process |= {f"{kind}-{number}": order[number % len(order)] for number in range(count)}
        return order[:count]

    def _able(self, role: HostRole) -> list[str]:
        able = [host.name for host in self._hosts if role in host.roles]
        if not able:
            raise RecipeError(
                f"no host has the role {role}; pass --node NAME:roles={role} for one of them, or no roles"
            )
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
