"""How often garbage is collected: rarely while a process imports its libraries, and as usual afterwards.

Imported objects are never garbage. Python nevertheless searches them again and again while their number grows, which
takes an eighth of the CPU time in which a process with torch and transformers starts.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
#: Number of new objects after which the youngest generation is collected; Python's default is hundreds.
_WHILE_LOADING = 50_000


def collect_rarely() -> None:
    """Collect garbage rarely, while a process starts. A command that serves no requests may keep this setting."""
    gc.set_threshold(_WHILE_LOADING)


def collect_as_usual() -> None:
    """Restore the frequency at which Python normally collects garbage."""
    gc.set_threshold(*_USUAL)
