"""Timeouts of tests. Only a failing test waits this long; a busy machine needs much of it."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0

#: An immediate event arrives within this time on a busy machine; the fault under test would delay it by `PATIENCE_S`,
#: to which the test sets the timeout.
SOON_S: Final = 30.0
