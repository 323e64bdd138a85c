"""`Storage`: files in a directory or at any fsspec URL (`s3://…`, `gs://…`), named by their relative path.

A write is durable when the call returns: object stores guarantee that, and on disks, files and their directories are
synced. There is no rename, because object stores have none. To publish several files at once, write the file that makes
the others valid last. Every call blocks, so call outside of the event loop.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, cast

from fsspec.core import url_to_fs

from pipelinerl.errors import UserError
from pipelinerl.system.files import sync

_BLOCK_BYTES: Final = 8 * 2**20


class Storage:
    """A directory or URL that holds files. Calls raise `OSError`, or the errors of the library behind the URL."""

    def __init__(self, url: str) -> None:
        """Create the storage without reading. Raises `UserError` if no installed library supports this URL."""
        self.url = url.rstrip("/")
        try:
            self._files, root = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise UserError(f"{url} cannot be used: {error}; install the library that fsspec needs for it") from None
        self._root = str(root).rstrip("/")
        self._is_local = "file" in tuple(self._files.protocol)

    def write(self, name: str, *pieces: Any) -> None:
        """Write `pieces` (bytes or other buffers) one after the other to a file; an existing file is replaced."""
        with self._opened_new(name) as file:
            for piece in pieces:
                file.write(piece)

    def upload(self, source: Path, name: str) -> None:
        with source.open("rb") as origin, self._opened_new(name) as file:
            shutil.copyfileobj(origin, file, _BLOCK_BYTES)

    def read(self, name: str) -> bytes:
        return cast(bytes, self._files.cat_file(f"{self._root}/{name}"))

    def open(self, name: str) -> io.BufferedIOBase:
        return cast(io.BufferedIOBase, self._files.open(f"{self._root}/{name}", "rb"))

    def has(self, name: str) -> bool:
        self._files.invalidate_cache()
        return bool(self._files.exists(f"{self._root}/{name}"))

    def names(self) -> list[str]:
        """Return the sorted names of files and folders at the top level."""
        self._files.invalidate_cache()
        try:
            found = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rsplit("/", 1)[-1] for path in found)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with its contents; no-op if it does not exist."""
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{self._root}/{name}", recursive=True)

    @contextlib.contextmanager
    def _opened_new(self, name: str) -> Iterator[io.BufferedIOBase]:
        path = f"{self._root}/{name}"
        folder = path.rpartition("/")[0]
        parents = [Path(folder), *Path(folder).parents]
        new = [each for each in parents if not each.exists()] if self._is_local else []
        self._files.makedirs(folder, exist_ok=True)
        with self._files.open(path, "wb") as file:
            yield file
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
        if self._is_local:
            for directory in {*parents[:2], *(each.parent for each in new)}:  # these directories may have new entries
                sync(directory)
