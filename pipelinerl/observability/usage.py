"""Processor and GPU seconds of a run's processes, which its launcher writes into the run's directory.

Processor seconds are those of the process and of all its child processes that have ended. GPU seconds are the time for
which the process held its GPUs, a shared one in part.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = "usage"


class Usage(msgspec.Struct, frozen=True):
    """Seconds of processors and of GPUs."""

    cpu_s: float = 0.0
    gpu_s: float = 0.0

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.cpu_s + other.cpu_s, self.gpu_s + other.gpu_s)


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process so far, also of one that has ended and was not waited for; else 0."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def write_usage(run_dir: Path, name: str, usage: Usage) -> None:
    """Write the usage of the process `name` over all launches, atomically. Raises OSError."""
    path = run_dir / FOLDER / f"{name}.json"
    path.parent.mkdir(mode=0o755, exist_ok=True)
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(usage))
    draft.replace(path)


def read_usage(run_dir: Path) -> dict[str, Usage]:
    """Return the usage of each process by name; without those whose file is unreadable."""
    found = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            found[path.stem] = msgspec.json.decode(path.read_bytes(), type=Usage)
    return found


def usage_by_role(run_dir: Path) -> dict[str, Usage]:
    """Return the usage of each role, its processes together: `engine` for engine-0 and engine-1."""
    roles: dict[str, Usage] = {}
    for name, usage in read_usage(run_dir).items():
        role, _, number = name.rpartition("-")
        role = role.removesuffix("-rank") if number.isdigit() else name
        roles[role] = roles.get(role, Usage()) + usage
    return roles


def usage_rows(run_dir: Path) -> list[tuple[str, str]]:
    """Return pairs (name, text) with the seconds of each role, for a summary; empty if nothing was measured."""
    roles = usage_by_role(run_dir)
    rows = {
        "processor seconds": {role: usage.cpu_s for role, usage in roles.items()},
        "GPU seconds": {role: usage.gpu_s for role, usage in roles.items() if usage.gpu_s},
    }
    return [
        (name, ", ".join(f"{role} {seconds:,.0f}" for role, seconds in sorted(each.items(), key=lambda at: -at[1])))
        for name, each in rows.items()
        if each
    ]
