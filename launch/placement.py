"""Which devices each role of a run gets, and how much of their memory: pure, and refused in a sentence if it cannot be.

Where there are enough devices, each engine has its own, from the first on, and the trainer has the last. On a machine
with a single one all share it. Anything else that is shared is shared on purpose: `launch.engine_devices` and
`launch.trainer_devices` say which roles are where. Whoever shares a device is told its share of the memory; what a
recipe leaves open is divided so that a tenth stays free for what no share counts: CUDA's contexts and libraries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from launch.devices import Devices, Origin
from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import RecipeError

TRAINER: Final = "trainer"

#: Most of a shared device's memory that is given out where the recipe does not say how much.
_GIVEN_OUT: Final = 0.9
#: That much of it is the trainer's, when engines share it with one.
_TRAINERS: Final = 0.45
#: Sums of shares are compared up to this: they are decimal fractions.
_ROUNDING: Final = 1e-6


@dataclass(frozen=True, slots=True)
class Assignment:
    """The devices of one process, by index, and its share of the memory of each; None: all of it."""

    indices: tuple[int, ...] = ()
    share: float | None = None


@dataclass(frozen=True, slots=True)
class Placement:
    """Who is where: assignments by the process' name, of those that use a device."""

    devices: Devices = field(default_factory=Devices)
    assignments: Mapping[str, Assignment] = field(default_factory=dict)

    def of(self, name: str) -> Assignment:
        """That of a process; no devices for one that uses none."""
        return self.assignments.get(name, Assignment())

    def bytes_of(self, name: str) -> int | None:
        """What a process may take of each of its devices; None where it uses none, or one of unknown size."""
        assignment = self.of(name)
        sizes = [self.devices.each[index].memory_mib for index in assignment.indices]
        known = [size for size in sizes if size is not None]
        return int(min(known) * 2**20 * (assignment.share or 1.0)) if known and len(known) == len(sizes) else None

    def describe(self) -> str:
        """Say in one line which process has which devices."""
        if not self.assignments:
            return "everything computes on the CPU"
        shared = [index for index in range(len(self.devices)) if len(list(_on(self.assignments, index))) > 1]
        unused = [index for index in range(len(self.devices)) if not list(_on(self.assignments, index))]
        parts = [", ".join(f"{name} on {self._where(each)}" for name, each in self.assignments.items())]
        parts += [f"shared: {', '.join(map(self.devices.label, shared))}"] if shared else []
        parts += [f"free: {', '.join(map(self.devices.label, unused))}"] if unused else []
        return "; ".join(parts)

    def _where(self, assignment: Assignment) -> str:
        labels = " + ".join(map(self.devices.label, assignment.indices))
        if assignment.share is None:
            return labels
        memory = self.devices.each[assignment.indices[0]].memory_mib
        much = "" if memory is None else f", {assignment.share * memory / 1024:.1f} GiB"
        return f"{labels} ({assignment.share:g} of its memory{much})"


def place(config: RunConfig, devices: Devices) -> Placement:
    """The placement that the recipe asks for, on these devices.

    Raises:
        RecipeError: there are too few, or what is said of them contradicts itself.
    """
    check_uses(config)
    if not devices.each:
        check_none_is_needed(config, devices)
        return Placement(devices)
    _check_counts(config, devices)
    indices = _indices(config, devices)
    shares = _shares(config, indices, devices)
    if config.weights.backend == "nccl":
        for index in range(len(devices)):
            if len(together := [name for name in indices if index in indices[name]]) > 1:
                raise RecipeError(
                    'weights.backend = "nccl" needs a GPU for each engine and for the trainer, and '
                    f"{devices.label(index)} is that of {' and '.join(together)}; place them apart, or say gloo"
                )
    return Placement(devices, {name: Assignment(indices[name], shares[name]) for name in indices})


def check_uses(config: RunConfig) -> None:
    """Raise RecipeError for devices and shares of roles that use none on any machine."""
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
            raise RecipeError(f"launch.{role}_devices: {why}; leave it out")
        if section.memory_share is not None:
            raise RecipeError(f"{role}.memory_share is of a GPU's memory, and {why}; leave it out")


def _check_counts(config: RunConfig, devices: Devices) -> None:
    """Raise RecipeError for named devices that are not there, or not as many as their processes take."""
    named = config.launch.engine_devices
    if named and len(named) != config.engine.count:
        raise RecipeError(
            f"launch.engine_devices must be a list for each of the {config.engine.count} engines, got {len(named)}; "
            "such as [[0], [1]] for two"
        )
    takes = {"launch.engine_devices": ("each engine", config.gpus_of_engine(), "engine.devices")}
    takes["launch.trainer_devices"] = ("the trainer", config.gpus_of_trainer, "what it trains with")
    for key, indices in _explicit(config):
        who, needs, because = takes[key]
        if len(set(indices)) != needs or len(indices) != needs:
            raise RecipeError(f"{key}: {who} takes {needs} different devices by {because}, got {list(indices)}")
        if beyond := [index for index in indices if index >= len(devices)]:
            raise RecipeError(f"{key} names device {beyond[0]}, and there {_there(devices)}; devices count from 0")


def check_none_is_needed(config: RunConfig, devices: Devices) -> None:
    """Raise RecipeError when the recipe insists on GPUs: there are none."""
    asked = list(dict.fromkeys(key for key, _ in _explicit(config)))
    for role, section, needs in (
        ("engine", config.engine, config.gpus_of_engine()),
        ("trainer", config.trainer, config.gpus_of_trainer),
    ):
        asked += [f"{role}.device=cuda"] if section.device == "cuda" and needs else []
    if asked:
        raise RecipeError(f"{' and '.join(asked)} ask for GPUs, and there {_there(devices)}; leave that out")


def _explicit(config: RunConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    for indices in config.launch.engine_devices:
        yield "launch.engine_devices", indices
    if config.launch.trainer_devices:
        yield "launch.trainer_devices", config.launch.trainer_devices


def _indices(config: RunConfig, devices: Devices) -> dict[str, tuple[int, ...]]:
    """Devices by process: as the recipe says, and the others apart from them."""
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
    return indices_by_name | ({TRAINER: of_trainer} if of_trainer else {})


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
    remedies.append("say engine.device=cpu or trainer.device=cpu")
    asked = f"{wanted} GPU{'s are' if wanted > 1 else ' is'} asked for, {' and '.join(words)}"
    return f"{asked}, and there {_there(devices)}{left}; {', or '.join(remedies)}"


def _there(devices: Devices) -> str:
    """`is 1`, `are 4`: as the driver says, or as the user's variable leaves."""
    count = len(devices)
    where = ", as CUDA_VISIBLE_DEVICES says" if devices.origin is Origin.VARIABLE else ""
    return (f"is {count or 'none'}" if count < 2 else f"are {count}") + where


def _shares(config: RunConfig, indices: Mapping[str, tuple[int, ...]], devices: Devices) -> dict[str, float | None]:
    """The share of each process: the recipe's, else what is left of the devices that it shares with others."""
    requested = {name: _requested_share(config, name) for name in indices}
    shares = dict(requested)
    for index in range(len(devices)):
        here = [name for name in indices if index in indices[name]]
        if len(here) > 1:
            for name, share in _divided(here, requested, label=devices.label(index)).items():
                before = shares[name]
                shares[name] = share if before is None else min(before, share)
    return shares


def _requested_share(config: RunConfig, name: str) -> float | None:
    return config.trainer.memory_share if name == TRAINER else config.engine.memory_share


def _divided(here: Sequence[str], requested: Mapping[str, float | None], *, label: str) -> dict[str, float]:
    """Shares of one device; those that are open get equal parts, but the trainer up to half of all."""
    stated = {name: share for name in here if (share := requested[name]) is not None}
    still_open = [name for name in here if name not in stated]
    left = (_GIVEN_OUT if still_open else 1.0) - sum(stated.values())
    if left < -_ROUNDING or (still_open and left < _ROUNDING):
        shares = " and ".join(f"{name} {share:g}" for name, share in stated.items())
        none = f", which leaves nothing for {' and '.join(still_open)}" if still_open else ", more than all of it"
        raise RecipeError(
            f"of the memory of {label} {shares} is asked for{none}; lower engine.memory_share or trainer.memory_share"
        )
    engines = [name for name in still_open if name != TRAINER]
    of_trainer = 0.0
    if TRAINER in still_open:
        of_trainer = min(left, _TRAINERS) if engines else left
    divided = stated | {name: (left - of_trainer) / len(engines) for name in engines}
    divided |= {TRAINER: of_trainer} if TRAINER in still_open else {}
    return {
        name: share if name in stated else math.floor(share * 1000 + _ROUNDING) / 1000
        for name, share in divided.items()
    }


def _on(assignments: Mapping[str, Assignment], index: int) -> Iterator[str]:
    return (name for name, each in assignments.items() if index in each.indices)
