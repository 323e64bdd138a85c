"""Timeouts of tests, and waits. Only a failing test waits this long, but a busy machine may need much of the time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

PATIENCE_S: Final = 240.0

#: Time limit in seconds for an event that should come immediately, generous enough for a busy machine. If the code had
#: the fault that the test looks for, the event would come only after `PATIENCE_S`, which the test sets as a timeout.
SOON_S: Final = 30.0


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Block until `holds()`, for at most `PATIENCE_S`; `what` names the event in the error message."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited {PATIENCE_S:g} s until {what}"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return True if the process runs; a zombie does not count, because it has ended and only waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
