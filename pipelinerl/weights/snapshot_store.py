"""`SnapshotStore`: the persistent copy of a parameter server's newest version (RLAX §3.2: double storage).

    <place>/1.57/weights.bin        the flat bytes
    <place>/1.57/manifest.json      layout, digest, size; written last: without it there is no snapshot

`place` is a directory, or any URL that fsspec knows (`s3://…`, `gs://…`). What is read back has the digest that it had
when it was saved, or is refused. Every call blocks: for a thread beside the server.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from fsspec.core import url_to_fs
from numpy.typing import NDArray

from inference_contract.schemas import WeightLayout
from pipelinerl.errors import CheckpointError
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.retention import Key, named

log = logging.getLogger("pipelinerl")

_BYTES: Final = "weights.bin"
_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 1


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version as it lies in the store; `num_bytes` are those of its layout."""

    key: Key
    layout: WeightLayout
    digest: str


@final
class SnapshotStore:
    """The newest `keep` snapshots below `place`; made by one server, which alone writes there."""

    def __init__(self, place: str, *, keep: int = 2) -> None:
        self.place = place
        self._keep = keep
        self._files, root = url_to_fs(place)
        self._root = str(root).rstrip("/")
        self._is_local = "file" in tuple(self._files.protocol)

    def save(self, key: Key, layout: WeightLayout, memory: NDArray[Any], digest: str) -> None:
        """Write a snapshot; durable when this returns. Raises `OSError`."""
        folder = f"{self._root}/{named(key)}"
        with contextlib.suppress(FileNotFoundError):
            self._files.rm(f"{folder}/{_MANIFEST}")  # of the same version, should its bytes differ
        self._files.makedirs(folder, exist_ok=True)
        manifest = {"format": _FORMAT, "epoch": key[0], "version": key[1], "digest": digest}
        self._write(f"{folder}/{_BYTES}", memory.data)
        self._write(f"{folder}/{_MANIFEST}", json.dumps(manifest | {"layout": layout.model_dump(mode="json")}).encode())
        for old in self._keys()[: -self._keep]:
            self._files.rm(f"{self._root}/{named(old)}", recursive=True)

    def newest(self) -> Iterator[Snapshot]:
        """What can be read back, the newest first; damaged manifests are named in the log and skipped."""
        for key in reversed(self._keys()):
            try:
                text = self._files.cat_file(f"{self._root}/{named(key)}/{_MANIFEST}")
                manifest = json.loads(text)
                if manifest["format"] != _FORMAT or (manifest["epoch"], manifest["version"]) != key:
                    raise ValueError(f"expected format {_FORMAT} of version {named(key)}")
                yield Snapshot(key, WeightLayout.model_validate(manifest["layout"]), str(manifest["digest"]))
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("skipping the snapshot %s in %s, which is not whole: %s", named(key), self.place, error)

    def read(self, snapshot: Snapshot, into: NDArray[Any]) -> None:
        """Fill `into` [num_bytes].

        Raises:
            CheckpointError: the bytes are missing, or are not those that were saved.
        """
        where = f"{self.place}: weights {named(snapshot.key)}"
        try:
            with self._files.open(f"{self._root}/{named(snapshot.key)}/{_BYTES}", "rb") as file:
                at, view = 0, into.data
                while at < len(view) and (count := file.readinto(view[at:])):
                    at += count
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None
        digest = WeightDigest()
        digest.update(into[:at])
        if digest.hexdigest() != snapshot.digest:
            raise CheckpointError(f"{where} have changed since they were saved; they are not used")

    def _keys(self) -> list[Key]:
        """Folders with a version's name, oldest first, whole or not."""
        try:
            found = [str(path).rstrip("/").rsplit("/", 1)[-1] for path in self._files.ls(self._root, detail=False)]
        except FileNotFoundError:
            return []
        parts = [name.split(".") for name in found]
        return sorted((int(p[0]), int(p[1])) for p in parts if len(p) == 2 and p[0].isdecimal() and p[1].isdecimal())

    def _write(self, path: str, data: Any) -> None:
        with self._files.open(path, "wb") as file:
            file.write(data)
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())
