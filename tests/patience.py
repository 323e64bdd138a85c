"""How long a test waits for what must come. Only one that fails waits so long; a busy machine needs much of it."""

from __future__ import annotations

from typing import Final

PATIENCE_S: Final = 240.0
