"""Detection of accelerators from the device files of their drivers, without loading a library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

#: Device files of the drivers: NVIDIA's and AMD's, and Google's for TPUs.
_FILES: Final = (
    "dev/nvidia[0-9]*",
    "proc/driver/nvidia/gpus/*",
    "dev/dxg",
    "dev/kfd",
    "dev/accel[0-9]*",
    "dev/vfio/[0-9]*",
)


def has_accelerator(root: Path = Path("/")) -> bool:
    """Return True if a process with this environment would see a GPU or a TPU."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    return any(next(root.glob(pattern), None) is not None for pattern in _FILES)
