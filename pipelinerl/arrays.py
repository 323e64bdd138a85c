"""What numpy, torch and jax.numpy share, so that the objective is written once.

The library of an array is found through its type and `sys.modules`: whoever holds an array has already imported its
library, so nothing heavy is imported here.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any, Final

import numpy as np

#: Any array of one library: numpy, torch or jax.
Array = Any

_NAMESPACES: Final = {"numpy": "numpy", "torch": "torch", "jax": "jax.numpy", "jaxlib": "jax.numpy"}


def namespace(array: Array) -> ModuleType:
    """The module whose `exp`, `expm1`, `where`, `clip`, `abs`, `zeros_like` work on `array`: numpy, torch or jax.numpy.

    Raises:
        TypeError: `array` belongs to none of the three.
    """
    for base in type(array).__mro__:
        name = _NAMESPACES.get(base.__module__.partition(".")[0])
        if name is not None:
            return sys.modules[name]
    raise TypeError(
        f"expected an array of numpy, torch or jax, got {type(array).__module__}.{type(array).__qualname__}"
    )


def stop_gradient(array: Array) -> Array:
    """The same values, through which no gradient flows: sg(·) of RLAX Eq. 3."""
    xp = namespace(array).__name__
    if xp == "torch":
        return array.detach()
    return sys.modules["jax"].lax.stop_gradient(array) if xp == "jax.numpy" else array


def on_host(array: Array) -> np.ndarray[Any, Any] | None:
    """The values as numpy's; None of an array that has none yet, since JAX is compiling what will compute it."""
    xp = namespace(array).__name__
    if xp == "torch":
        held: np.ndarray[Any, Any] = array.detach().cpu().numpy()
        return held
    if xp == "jax.numpy" and isinstance(array, sys.modules["jax"].core.Tracer):
        return None
    return np.asarray(array)


def segment_sum(values: Array, segment_ids: Array, num_segments: int) -> Array:
    """Sums [S] of `values` [T] over tokens that share a segment id (0..S-1); a segment without tokens sums to 0."""
    xp = namespace(values).__name__
    if xp == "torch":
        return values.new_zeros(num_segments).index_add(0, segment_ids, values)
    if xp == "jax.numpy":
        return sys.modules["jax"].ops.segment_sum(values, segment_ids, num_segments)
    sums = np.zeros(num_segments, dtype=values.dtype)
    np.add.at(sums, segment_ids, values)
    return sums
