"""How often a run's processes died: the launcher writes it down, `pipelinerl status` shows it.

A death is forgiven for each `FORGIVEN_EVERY_S` that the process was up: who is killed now and then, however often, is
started again, and who dies whenever it is started has soon spent what it may. `restarts.json` of the run's directory.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import msgspec

from pipelinerl.observability.status import RestartStatus

FORGIVEN_EVERY_S: Final = 100.0
_FILE: Final = "restarts.json"


class _Written(msgspec.Struct, frozen=True):
    at: float
    processes: tuple[RestartStatus, ...]


def write_restarts(run_dir: Path, processes: tuple[RestartStatus, ...]) -> None:
    """Those that have died, whole or not at all. Raises OSError."""
    draft = run_dir / f"{_FILE}.new"
    draft.write_bytes(msgspec.json.encode(_Written(time.time(), processes)))
    draft.replace(run_dir / _FILE)


def read_restarts(run_dir: Path) -> tuple[RestartStatus, ...]:
    """As of now; empty where no launcher has written anything that can be read."""
    try:
        written = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=_Written)
    except (OSError, msgspec.MsgspecError):
        return ()
    forgiven = max(0.0, time.time() - written.at) / FORGIVEN_EVERY_S
    return tuple(
        msgspec.structs.replace(one, unforgiven=max(0.0, one.unforgiven - forgiven)) for one in written.processes
    )


def restarts_line(processes: tuple[RestartStatus, ...]) -> str:
    """`deaths: trainer 5 (1.2 of 3 unforgiven)`; empty when nothing died."""
    listed = (f"{one.name} {one.deaths} ({one.unforgiven:.1f} of {one.limit} unforgiven)" for one in processes)
    return f"deaths: {', '.join(listed)}" if processes else ""
