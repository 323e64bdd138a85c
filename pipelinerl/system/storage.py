"""`Storage`: a directory, or any URL that fsspec knows (`s3://…`, `gs://…`), as files named by their path below it.

What is written is durable when the call returns: an object store promises that itself, on a disk files and the
directories that name them are synced. No rename is asked for, since object stores have none: whoever writes several
files as one writes last the one that makes them count. Every call blocks: for a thread beside the event loop.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast, final

from fsspec.core import url_to_fs

from pipelinerl.errors import UserError
from pipelinerl.system.files import sync

_BLOCK_BYTES: Final = 8 * 2**20


@final
class Storage:
    """Where copies are kept. Calls raise `OSError`, or what the library behind the URL raises."""

    def __init__(self, url: str) -> None:
        """Nothing is read yet. Raises `UserError`: no library that is installed knows such a URL."""
        self.url = url.rstrip("/")
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url} cannot be reached from here: {error}; fsspec names its libraries") from None
        self._root = str(root).rstrip("/")
        self._is_local = "file" in tuple(self._files.protocol)

    def write(self, name: str, *pieces: Any) -> None:
        """Write bytes, or anything with a buffer, one after the other, in place of what is there."""
        with self._opened_new(name) as file:
            for piece in pieces:
                file.write(piece)

    def upload(self, source: Path, name: str) -> None:
        """Copy a file."""
        with source.open("rb") as origin, self._opened_new(name) as file:
            shutil.copyfileobj(origin, file, _BLOCK_BYTES)

    def read(self, name: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        return cast(bytes, self._files.cat_file(f"{self._root}/{name}"))

    def open(self, name: str) -> io.BufferedIOBase:
        """The file, to be read from its beginning. Raises FileNotFoundError."""
        return cast(io.BufferedIOBase, self._files.open(f"{self._root}/{name}", "rb"))

    def has(self, name: str) -> bool:
        """Is there a file or folder of this name?"""
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._root}/{name}"))

    def names(self) -> list[str]:
        """Files and folders directly below, sorted."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with all that is in it; a no-op when there is none."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    @contextlib.contextmanager
    def _opened_new(self, name: str) -> Iterator[io.BufferedIOBase]:
        path = f"{self._root}/{name}"
        folder = path.rpartition("/")[0]
        self._files.makedirs(folder, exist_ok=True)
        with self._files.open(path, "wb") as file:
            yield file
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        if self._is_local:
            for directory in (folder, str(Path(folder).parent)):  # which names the file, and which names that
                sync(Path(directory))
