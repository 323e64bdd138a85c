"""Timeouts of tests. Only a failing test waits this long, but a busy machine may need much of the time."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0

#: Time limit in seconds for an event that should come immediately, generous enough for a busy machine. If the code had
#: the fault that the test looks for, the event would come only after `PATIENCE_S`, which the test sets as a timeout.
SOON_S: Final = 30.0
