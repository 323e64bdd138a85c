"""How much of each GPU's memory a JAX process takes: it reserves all that it may take when it first looks for devices.

Bounds nothing on CPUs and TPUs. What the user has set in the environment stays.
"""

from __future__ import annotations

import os
from typing import Final

#: JAX knows both names, the second being the older, and refuses to be given both.
_VARIABLES: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def bound(share: float | None) -> None:
    """Let this process reserve no more than `share` of each GPU; None leaves JAX's own, three quarters.

    Called before the first look for devices: after it JAX does not read this any more.
    """
    if share is not None and not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = f"{share:g}"
