"""Kill the process groups of a launcher that has exited. Run by path: `python -S -E reaper.py`, with a pipe as stdin.

The launcher writes a line `+GROUP` for each process group that it starts, and `-GROUP` for each that ended. The pipe
closes when the launcher exits, even by SIGKILL; the reaper then kills the remaining groups, grandchildren included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def reap(lines: Iterable[str]) -> None:
    """Read the lines until the pipe closes, then kill every process group that has not ended."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        if line.startswith("+"):
            groups.add(group)
        else:
            groups.discard(group)
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    reap(sys.stdin)
