"""Run by path next to a launcher: `python -S -E reaper.py`, with a pipe from the launcher as stdin.

It reads `+GROUP` and `-GROUP` lines: process groups that were started and that ended. The pipe closes when the launcher
exits, even by SIGKILL. The reaper then kills the remaining groups, including grandchildren of the launcher.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def reap(lines: Iterable[str]) -> None:
    """Follow the lines to their end, then kill every group that is left."""
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
