"""Operations shared by numpy, torch and jax.numpy, so that the objective is written once.

An array's library is looked up in `sys.modules` by the array's type, so this module imports neither torch nor jax.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

import numpy as np

#: An array of numpy, torch or jax.
Array = Any

_NAMESPACES: Final = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy"}


def namespace(array: Array) -> ModuleType:
    """Return the module whose `exp`, `where`, … work on `array`; raise `TypeError` for an array of another library."""
    for base in type(array).__mro__:
        name = _NAMESPACES.get(base.__module__.partition(".")[0])
        if name is not None:
            return sys.modules[name]
    raise TypeError(
        f"expected an array of numpy, torch or jax, got {type(array).__module__}.{type(array).__qualname__}"
    )


def stop_gradient(array: Array) -> Array:
    """Return the array with its gradient blocked: sg(·) of RLAX Eq. 3."""
    xp = namespace(array).__name__
    if xp == "torch":
        return array.detach()
    return sys.modules["jax"].lax.stop_gradient(array) if xp == "jax.numpy" else array


def on_host(array: Array) -> np.ndarray[Any, Any] | None:
    """Return the array's values as a numpy array, or None for a JAX tracer, which has no values yet."""
    xp = namespace(array).__name__
    if xp == "torch":
        held: np.ndarray[Any, Any] = array.detach().cpu().numpy()
        return held
    if xp == "jax.numpy" and isinstance(array, sys.modules["jax"].core.Tracer):
        return None
    return np.asarray(array)


def segment_sum(values: Array, segment_ids: Array, num_segments: int) -> Array:
    """Return the sums [S] of `values` [T] by segment id (0..S-1); a segment without tokens sums to 0."""
    xp = namespace(values).__name__
    if xp == "torch":
        return values.new_zeros(num_segments).index_add(0, segment_ids, values)
    if xp == "jax.numpy":
        return sys.modules["jax"].ops.segment_sum(values, segment_ids, num_segments)
    sums = np.zeros(num_segments, dtype=values.dtype)
    np.add.at(sums, segment_ids, values)
    return sums
