"""Run by path, beside a launcher: `python -S -E reaper.py`, with the launcher's pipe as stdin.

It reads `+GROUP` and `-GROUP` lines, the process groups that live, and when the pipe closes, which it also does when
the launcher is killed, it kills what is left: the children of a run's processes, which no parent can speak for.
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
