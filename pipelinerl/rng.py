"""The only source of randomness: pure functions of their keys.

Problem i of a run is a function of (seed, mixture, i); the sampling noise of a token is a function of (seed, sample,
position). No state is kept, so a resumed or repeated run draws the same numbers.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

UInt64 = NDArray[np.uint64]

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)


def key(seed: int, *path: int | str) -> int:
    """Return a 63-bit key for `seed` and the parts of `path`, equal on all processes, machines and Python versions."""
    text = "\x1f".join([str(seed), *(f"{type(part).__name__}:{part}" for part in path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def generator(seed: int, *path: int | str) -> np.random.Generator:
    """Return a new numpy generator, seeded by `seed` and the parts of `path`."""
    return np.random.Generator(np.random.PCG64(key(seed, *path)))


def sample_keys(seed: int, num_samples: int) -> UInt64:
    """Return one key per sample of a request, [num_samples], for `uniform`."""
    with np.errstate(over="ignore"):
        return _mix(np.uint64(seed) + _GAMMA * np.arange(1, num_samples + 1, dtype=np.uint64))


def uniform(keys: UInt64, positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return a uniform number in [0, 1) per pair (key, position). Counter-based: batching does not change the numbers.

    Args:
        keys: u64 [B], from `sample_keys`.
        positions: i64 [B], the index of the token being sampled within its sequence.
    """
    with np.errstate(over="ignore"):
        bits = _mix(keys + _GAMMA * (positions.astype(np.uint64) + np.uint64(1)))
    return (bits >> np.uint64(11)).astype(np.float64) * (1.0 / (1 << 53))


def _mix(state: UInt64) -> UInt64:
    """Apply SplitMix64's finaliser (Steele, Lea, Flood 2014) elementwise."""
    state = (state ^ (state >> np.uint64(30))) * _MIX1
    state = (state ^ (state >> np.uint64(27))) * _MIX2
    return state ^ (state >> np.uint64(31))
