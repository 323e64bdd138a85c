"""A role's record of its process in the run's directory, from which `pipelinerl adopt` finds and restarts the role.

    runs/tiny/processes/engine-0.json   {"role": "engine", "name": "engine-0", "pid": 4711, "started": 911253, …}

A record exists while its process lives, and after a crash. A role that ends by itself, on a signal or because of a user
error removes its record, so it is not restarted. Arguments and environment are not recorded, since they may hold
secrets: `adopt` reads them from `/proc` while the process lives.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import quote

import msgspec

from pipelinerl.system.files import write_private

FOLDER: Final = "processes"


class ProcessRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One process of a role.

    Attributes:
        role: subcommand of `pipelinerl`, such as `engine`.
        started: start time in clock ticks since boot, which tells the process from a later one with the same id.
        cwd: the working directory at the start.
        argv: the command line, if the process has since executed another program; else empty.
        ended_without: a file that the process removes when it ends by itself; empty if it removes its record instead.
    """

    role: str
    name: str
    pid: int
    started: int
    host: str
    cwd: str
    argv: tuple[str, ...] = ()
    ended_without: str = ""

    @property
    def is_alive(self) -> bool:
        """True if the process runs; a process that has ended and was not waited for does not."""
        return started_at(self.pid) == self.started


def started_at(pid: int) -> int | None:
    """Return the start time of a running process in clock ticks since boot; None if it does not run."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else int(rest[18])


def write_record(
    run_dir: Path, role: str, name: str, *, argv: Sequence[str] = (), ended_without: Path | None = None
) -> Path | None:
    """Record this process in the run's directory; return the record's path, or None without such a directory."""
    pid = os.getpid()
    record = ProcessRecord(
        role=role,
        name=name,
        pid=pid,
        started=started_at(pid) or 0,
        host=socket.gethostname(),
        cwd=os.getcwd(),
        argv=tuple(argv),
        ended_without="" if ended_without is None else str(ended_without.absolute()),
    )
    path = run_dir / FOLDER / f"{quote(name, safe='')}.json"
    with suppress(OSError):  # the directory may be on another machine; then only `adopt` does not work
        path.parent.mkdir(mode=0o755, exist_ok=True)
        write_private(path, msgspec.json.encode(record).decode())
        return path
    return None


@contextmanager
def recorded(run_dir: Path, role: str, name: str) -> Iterator[None]:
    """Record this process during the block; the record stays only if the block raises an error that a restart may fix.

    Such an error is any exception but `SystemExit` with status 0, 2 (a user error) or above 128 (a signal).
    """
    path = write_record(run_dir, role, name)
    try:
        yield
    except SystemExit as ended:
        if isinstance(ended.code, int) and (ended.code in (0, 2) or ended.code > 128):
            _remove(path)
        raise
    _remove(path)


def _remove(path: Path | None) -> None:
    with suppress(OSError):
        if path is not None and msgspec.json.decode(path.read_bytes(), type=ProcessRecord).pid == os.getpid():
            path.unlink()


def read_records(run_dir: Path) -> dict[str, ProcessRecord]:
    """Return the records of roles on this machine, by name; unreadable files are left out."""
    records = {}
    for path in sorted((run_dir / FOLDER).glob("*.json")):
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            record = msgspec.json.decode(path.read_bytes(), type=ProcessRecord)
            if record.host == socket.gethostname():
                records[record.name] = record
    return records
