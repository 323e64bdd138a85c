"""The GPUs that a run may use, as a value: those that the NVIDIA driver lists, narrowed by CUDA_VISIBLE_DEVICES.

No CUDA library is loaded: the list comes from `nvidia-smi`, or from /proc/driver/nvidia if that program is missing.
`read_devices` is pure. TPUs and other accelerators are not detected; the user assigns them to processes
(docs/understand/tpu.md).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Final

from pipelinerl.config.recipe import RunConfig
from pipelinerl.errors import UserError

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"

#: Without persistence mode the driver wakes the GPUs first, which takes seconds.
_DEADLINE_S: Final = 30.0
_QUERY: Final = ("nvidia-smi", "--query-gpu=index,uuid,memory.total,mig.mode.current", "--format=csv,noheader,nounits")
_INSTANCES: Final = ("nvidia-smi", "-L")
_PROC: Final = Path("/proc/driver/nvidia/gpus")


class Origin(StrEnum):
    """The source of the list of devices."""

    DRIVER = "driver"
    """The driver, which numbers GPUs in the order of the PCI bus."""
    VARIABLE = "variable"
    """The user, who set CUDA_VISIBLE_DEVICES."""


@dataclass(frozen=True, slots=True)
class VisibleDevice:
    """A GPU, or one MIG instance of a GPU: its name in CUDA_VISIBLE_DEVICES, and its memory if known."""

    name: str
    memory_mib: int | None = None


@dataclass(frozen=True, slots=True)
class Devices:
    """The devices that a run may use; recipes refer to them by their index here."""

    each: tuple[VisibleDevice, ...] = ()
    origin: Origin = Origin.DRIVER

    def __len__(self) -> int:
        return len(self.each)

    def label(self, index: int) -> str:
        """Return a name for people, such as `GPU 1`, or `GPU 1 (MIG-…)` if CUDA has another name for it."""
        name = self.each[index].name
        return f"GPU {index}" if name == str(index) else f"GPU {index} ({name})"

    def environment(self, indices: Sequence[int]) -> Mapping[str, str]:
        """Return the variables that make exactly these devices visible to a process; empty if the process needs no
        variables.
        """
        if not indices:
            return {}
        shown = {VARIABLE: ",".join(self.each[index].name for index in indices)}
        # By default CUDA counts the fastest GPU first, whereas `nvidia-smi` counts by PCI bus. Indices that the user
        # wrote in CUDA_VISIBLE_DEVICES keep the user's own order.
        return shown | ({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"} if self.origin is Origin.DRIVER else {})


def devices_for(config: RunConfig, environ: Mapping[str, str]) -> Devices:
    """Return the devices of this machine that the run may use. Skip detection if the recipe uses no GPU.

    Raises:
        UserError: the driver does not answer in time, or CUDA_VISIBLE_DEVICES names a device that does not exist.
    """
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
        visible: CUDA_VISIBLE_DEVICES, whose names are kept; None if the variable is not set.

    Raises:
        UserError: `visible` names a device that does not exist.
    """
    rows = [[field.strip() for field in line.split(",")] for line in gpus.splitlines() if line.strip()]
    if visible is not None:
        return Devices(tuple(_named(rows, visible)) if rows else (), Origin.VARIABLE)
    devices: list[VisibleDevice] = []
    for index, uuid, memory, mig in rows:
        if mig == "Enabled":
            devices += [VisibleDevice(name) for name in _instances_of(uuid, instances)]
        else:
            devices.append(VisibleDevice(index, _mebibytes(memory)))
    return Devices(tuple(devices))


def _named(rows: list[list[str]], visible: str) -> Iterator[VisibleDevice]:
    """Yield the devices that CUDA_VISIBLE_DEVICES names, up to the first word that CUDA would ignore."""
    sizes = {row[2] for row in rows}
    for name in takewhile(_names_something, (part.strip() for part in visible.split(","))):
        if name.startswith("MIG-"):
            yield VisibleDevice(name)
            continue
        if name.isdecimal():
            # CUDA_DEVICE_ORDER decides which GPU an index means. The memory of that GPU is known only if all GPUs have
            # equally much.
            same = [row for row in rows if len(sizes) == 1 and row[3] != "Enabled"] if int(name) < len(rows) else None
        else:
            same = [row for row in rows if row[1].startswith(name)] or None
        if same is None:
            there = ", ".join(f"{row[0]} ({row[1]})" for row in rows)
            raise UserError(f"{VARIABLE} names {name}, and this machine has the GPUs {there}; correct the variable")
        yield VisibleDevice(name, _mebibytes(same[0][2]) if same else None)


def _names_something(name: str) -> bool:
    return name.isdecimal() or name.startswith(("GPU-", "MIG-"))


def _instances_of(uuid: str, listing: str) -> list[str]:
    """Return the UUIDs of one GPU's MIG instances, from the output of `nvidia-smi -L`."""
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
    """Yield lines like those of `nvidia-smi` from the driver's own files, without memory and instances."""
    folders = sorted(gpus.iterdir()) if gpus.is_dir() else []
    for index, folder in enumerate(folders):  # each folder is named after the PCI address of its GPU
        uuid = re.search(r"GPU UUID:\s*(\S+)", (folder / "information").read_text())
        yield f"{index}, {uuid[1] if uuid else ''}, , "
