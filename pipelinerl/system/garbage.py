"""How often Python looks for garbage: rarely while a process imports what it needs, and as usual once it works.

What is imported is no garbage, and stays: to look for some among it, again and again as it grows, is an eighth of the
processor time in which a process with torch and transformers starts.
"""

from __future__ import annotations

import gc

_USUAL = gc.get_threshold()
#: New objects, by which a collection of the youngest begins; Python's own is hundreds.
_WHILE_LOADING = 50_000


def collect_rarely() -> None:
    """For a process that begins; one that serves nobody, a command, may leave it so."""
    gc.set_threshold(_WHILE_LOADING)


def collect_as_usual() -> None:
    """A collection is as short as Python makes it again."""
    gc.set_threshold(*_USUAL)
