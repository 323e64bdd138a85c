"""`SharedBytes`: a flat buffer that several local processes map, so that weights pass between them without a copy.

The buffer has a name only until the other side has attached. From then on the buffer lives exactly as long as the
processes that map it, however these processes end.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

import torch
from torch import Tensor

from pipelinerl.errors import ModelError

#: A file system in memory; systems without it use a file in the temporary directory.
_MEMORY: Final = Path("/dev/shm")


def check_room(num_bytes: int, *, folder: Path = _MEMORY) -> None:
    """Raise `ModelError` if shared memory has less than `num_bytes` free; containers get only 64 MB by default."""
    if not folder.is_dir():
        return
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise ModelError(
            f"an engine in processes of its own needs {_mib(num_bytes)} of shared memory, {folder} has {_mib(free)} "
            f"free; start the container with --shm-size={-(-num_bytes // 2**30) + 1}g or more, or mount a larger tmpfs "
            f"at {folder}"
        )


def _mib(size: int) -> str:
    return f"{size / 2**20:,.0f} MiB"


class SharedBytes:
    """Memory that other processes can map by `path`: the tensor `tensor`, u8 [num_bytes], followed by `further`, u8."""

    def __init__(self, num_bytes: int, *, further: int = 0) -> None:
        """Reserve memory for `tensor` only; `reserve` does it for `further`. Raises `ModelError` or `OSError`."""
        check_room(num_bytes)
        descriptor, path = tempfile.mkstemp(prefix="pipelinerl-", dir=_MEMORY if _MEMORY.is_dir() else None)
        self.path = Path(path)
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        with ExitStack() as undone:
            undone.callback(self.forget_name)
            os.posix_fallocate(descriptor, 0, num_bytes)
            os.truncate(descriptor, num_bytes + further)
            whole = attach(self.path, num_bytes + further)
            self.tensor, self.further = whole[:num_bytes], whole[num_bytes:]
            undone.pop_all()

    def reserve(self, num_bytes: int) -> None:
        """Reserve `further`'s first `num_bytes`, or raise `OSError`; writing beyond may end the process."""
        os.posix_fallocate(self._descriptor, len(self.tensor), num_bytes)

    def forget_name(self) -> None:
        """Remove the name, so that no other process can attach. Repeating is a no-op."""
        self.path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.forget_name()


def attach(path: Path, num_bytes: int) -> Tensor:
    """Map the buffer that another process has named `path`, u8 [num_bytes]."""
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
