"""Timeouts of tests. Only a failing test waits this long, but a busy machine may need much of the time."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0

#: Time limit for an event that is immediate, on a busy machine. The fault under test would delay the event by
#: `PATIENCE_S`, which the test sets as the timeout of the code.
SOON_S: Final = 30.0
