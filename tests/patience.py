"""Timeouts of tests. Only a failing test waits this long, but a busy machine may need much of the time."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0

#: Time limit in seconds, even on a busy machine, for an event that should come immediately. With the fault that the
#: test looks for, the event would come only after `PATIENCE_S`, which the test sets as the timeout of the code.
SOON_S: Final = 30.0
