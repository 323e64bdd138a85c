"""The share of each GPU's memory that a JAX process may take; it is reserved at the first look for devices.

It has no effect on CPUs and TPUs. The user's own environment variables take precedence.
"""

from __future__ import annotations

import os
from typing import Final

#: JAX knows both names, of which the second is older, and rejects both at once.
_VARIABLES: Final = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")


def bound(share: float | None) -> None:
    """Limit this process to `share` of each GPU; None leaves JAX's default, three quarters.

    Must be called before the first look for devices; JAX ignores later changes.
    """
    if share is not None and not any(name in os.environ for name in _VARIABLES):
        os.environ[_VARIABLES[0]] = f"{share:g}"
