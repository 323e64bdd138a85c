"""Dithered rounding of fp32 weights to bfloat16, so that small updates reach the engines.

Near 0.05, bfloat16 values are 2.4e-4 apart, much more than an AdamW step. Rounded to nearest, all weights stay constant
for many steps and then jump together. Here each weight has its own threshold, uniform in [0, 1), and rounds up once its
fraction exceeds the threshold: after an update of a tenth of the spacing, a tenth of the weights have moved. On average
over the weights the rounding is exact (stochastic rounding).

The thresholds depend only on a parameter's name and the element's index. Equal weights therefore give equal bytes: in a
retried publication, on any mesh, after a restart, and in every backend. A weight on bfloat16's grid is unchanged.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl import rng
from trainer_contract.types import Float32

#: Number of thresholds in the repeating table; a prime, so that the rows of a matrix get different thresholds.
PERIOD: Final = 1_048_573


@cache
def thresholds() -> NDArray[np.int32]:
    """Return thresholds, i32 [PERIOD] in [0, 2^16), to add to a weight's 32 bits before the lower 16 are cut off."""
    return rng.generator(0, "dither").integers(0, 1 << 16, PERIOD, dtype=np.int32)


def phase(name: str) -> int:
    """Return the index in `thresholds()` at which the thresholds of the parameter `name` begin."""
    return rng.key(0, "dither", name) % PERIOD


def dithered(values: Float32, *, name: str) -> NDArray[np.uint16]:
    """Return the bits of f32 `values` of the parameter `name`, rounded to bfloat16 (in numpy)."""
    flat = np.ascontiguousarray(values).reshape(-1).view(np.uint32)
    rounded = np.empty(flat.size, np.uint16)
    begin = 0
    while begin < flat.size:
        first = (phase(name) + begin) % PERIOD
        noise = thresholds()[first : first + flat.size - begin].astype(np.uint32)
        end = begin + noise.size
        rounded[begin:end] = (flat[begin:end] + noise) >> np.uint32(16)
        begin = end
    return rounded.reshape(values.shape)
