"""How long a test waits for what must come. Only one that fails waits so long; a busy machine needs much of it."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0

#: What comes at once comes within this on a busy machine, and with the mistake that a test is about only when
#: `PATIENCE_S`, to which the test sets the wait, is over.
SOON_S: Final = 30.0
