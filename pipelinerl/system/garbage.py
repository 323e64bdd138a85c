"""Frequency of garbage collection: rarely while a process imports its libraries, and as usual afterwards.

Imported objects are never garbage. Searching them repeatedly as they grow takes an eighth of the CPU time in which a
process with torch and transformers starts.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
#: New objects before a collection of the youngest generation; Python's default is hundreds.
_WHILE_LOADING = 50_000


def collect_rarely() -> None:
    """Collect rarely, in a process that starts; a command that serves no requests may keep this setting."""
    gc.set_threshold(_WHILE_LOADING)


def collect_as_usual() -> None:
    """Restore Python's usual frequency."""
    gc.set_threshold(*_USUAL)
