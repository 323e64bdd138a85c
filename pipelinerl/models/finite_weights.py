"""Check of weights for NaN and infinity, which names the parameter before it is used.

A float is NaN or infinite if all bits of its exponent are set. Read as integers, such values are the largest of either
sign, so two maxima find them at the speed of memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from pipelinerl.errors import ModelError

#: The bits of the exponent, by dtype; other dtypes, such as eight bits, are not checked.
_EXPONENTS: Final = {"float32": 0x7F80_0000, "bfloat16": 0x7F80, "float16": 0x7C00, "float64": 0x7FF0 << 48}
#: The number of values checked at once, which fits a core's cache between the two maxima.
_BLOCK: Final = 2**18


def refuse_not_finite(path: Path, name: str, values: NDArray[Any], dtype: str) -> None:
    """Check the values of a parameter of the directory `path`.

    Args:
        values: of any shape, with items of the size of `dtype`, given by its name in torch and NumPy.

    Raises:
        ModelError: a value is NaN or infinite.
    """
    exponent = _EXPONENTS.get(dtype)
    if exponent is None:
        return
    width = values.itemsize
    words, negative = np.ascontiguousarray(values).reshape(-1).view(f"u{width}"), 1 << 8 * width - 1
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        if int(block.view(f"i{width}").max()) >= exponent or int(block.max()) >= negative | exponent:
            raise ModelError(
                f"{path}: the parameter {name} holds NaN or infinite values; copy the model again, or use an earlier "
                "checkpoint"
            )
