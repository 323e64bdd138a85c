"""`without_name_servers`: no name server is asked by this thread for a while; what a file of this machine knows is.

torch's TCPStore asks for the name of its peer's address with each connection that it makes, for a line of its log; and
for a loopback address, too, which it writes in a form that no hosts file has. Where the name server does not answer, or
loses one of many questions that come at once, the C library waits for seconds: a group of 64 engines formed in 5.1 s,
and in 0.1 s without. Torch says once in a process that the name cannot be had.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from typing import Any


@contextmanager
def without_name_servers(host: str) -> Iterator[None]:
    """What this thread looks up within, it looks up in files; a no-op without glibc, or where `host` is no address: the
    name of whom it talks to may be known to a name server alone."""
    state = _resolver() if _is_address(host) else None
    if state is None:
        yield
        return
    attempts, state[1] = state[1], 0
    try:
        yield
    finally:
        state[1] = attempts


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host))
    except ValueError:
        return False


def _resolver() -> Any:
    """The beginning of this thread's `struct __res_state`: seconds to the first timeout, then how often it is tried."""
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "__res_init")):
        return None
    library.__res_init()  # else the first question would begin with the defaults
    library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
    return library.__res_state()
