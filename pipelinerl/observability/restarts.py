"""Deaths of a run's processes: the launcher writes `restarts.json`, `pipelinerl status` shows it.

One death is forgiven for every `FORGIVEN_EVERY_S` of uptime. A process that dies now and then is always restarted; one
that dies right after each start soon exhausts its limit.
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
    """Write the processes that have died, atomically. Raises OSError."""
    draft = run_dir / f"{_FILE}.new"
    draft.write_bytes(msgspec.json.encode(_Written(time.time(), processes)))
    draft.replace(run_dir / _FILE)


def read_restarts(run_dir: Path) -> tuple[RestartStatus, ...]:
    """Return the deaths with forgiveness up to now; empty if there is no readable file."""
    try:
        written = msgspec.json.decode((run_dir / _FILE).read_bytes(), type=_Written)
    except (OSError, msgspec.MsgspecError):
        return ()
    forgiven = max(0.0, time.time() - written.at) / FORGIVEN_EVERY_S
    return tuple(
        msgspec.structs.replace(one, unforgiven=max(0.0, one.unforgiven - forgiven)) for one in written.processes
    )


def restarts_line(processes: tuple[RestartStatus, ...]) -> str:
    """Format deaths as `deaths: trainer 5 (1.2 of 3 unforgiven)`; empty if there are none."""
    listed = (f"{one.name} {one.deaths} ({one.unforgiven:.1f} of {one.limit} unforgiven)" for one in processes)
    return f"deaths: {', '.join(listed)}" if processes else ""
