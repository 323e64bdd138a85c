"""HTTP sessions that a test opened and nobody closed, each with its opener.

Left to the garbage collector, an open session fails whichever test runs when it is collected. Importing this module
makes every `aiohttp.ClientSession` of the process note where it was opened.
"""

from __future__ import annotations

import os
import traceback
from typing import Any, Final

import aiohttp

_FRAMES: Final = 6

_open: list[tuple[aiohttp.ClientSession, str]] = []
_found: list[aiohttp.ClientSession] = []  # kept, so that none of them is collected, and found, a second time
_open_session = aiohttp.ClientSession.__init__


def _noting(session: aiohttp.ClientSession, *arguments: Any, **named: Any) -> None:
    _open_session(session, *arguments, **named)
    test = os.environ.get("PYTEST_CURRENT_TEST", "before any test")
    _open.append((session, f"{test}, at\n" + "".join(traceback.format_stack(limit=_FRAMES)[:-1])))


aiohttp.ClientSession.__init__ = _noting  # type: ignore[method-assign]


def left_open() -> list[str]:
    """Who opened the sessions that are open and whose event loop runs no more, so that nobody can close them.

    Those of an event loop that still runs, in a server's thread, may be closed yet: they are looked at again next time.
    """
    _open[:] = [(session, opener) for session, opener in _open if not session.closed]
    lost = [(session, opener) for session, opener in _open if not session._loop.is_running()]
    _open[:] = [noted for noted in _open if noted not in lost]
    _found.extend(session for session, _ in lost)
    return [opener for _, opener in lost]
