"""HTTP sessions that a test left open, each with the place in the code that opened it.

If such a session were garbage-collected later, an unrelated test would fail. Importing this module makes every
`aiohttp.ClientSession` of the process record where it was opened.
"""

from __future__ import annotations

import os
import traceback
from typing import Any, Final

import aiohttp

_FRAMES: Final = 6

_open: list[tuple[aiohttp.ClientSession, str]] = []
_found: list[aiohttp.ClientSession] = []  # keeps reported sessions from being garbage-collected
_open_session = aiohttp.ClientSession.__init__


def _noting(session: aiohttp.ClientSession, *arguments: Any, **named: Any) -> None:
    _open_session(session, *arguments, **named)
    test = os.environ.get("PYTEST_CURRENT_TEST", "before any test")
    _open.append((session, f"{test}, at\n" + "".join(traceback.format_stack(limit=_FRAMES)[:-1])))


aiohttp.ClientSession.__init__ = _noting  # type: ignore[method-assign]


def left_open() -> list[str]:
    """Return, for each session that is still open after its event loop has ended, where in the code it was opened.

    Sessions on a running event loop, for example in a server's thread, may still be closed; the next call checks them
    again.
    """
    _open[:] = [(session, opener) for session, opener in _open if not session.closed]
    lost = [(session, opener) for session, opener in _open if not session._loop.is_running()]
    _open[:] = [noted for noted in _open if noted not in lost]
    _found.extend(session for session, _ in lost)
    return [opener for _, opener in lost]
