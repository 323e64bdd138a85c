"""`SnapshotStore`: the persistent copy of a parameter server's newest version (RLAX §3.2: double storage).

    <place>/1.57/weights.bin        the shard's bytes, its ranges back to back
    <place>/1.57/manifest.json      layout, shard, digests; written last: without it there is no snapshot

`place` is a directory, or any URL that fsspec knows (`s3://…`, `gs://…`). What is read back has the digest that it had
when it was saved, or is refused. Every call blocks: for a thread beside the server.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

from numpy.typing import NDArray

from inference_contract.weights import WeightLayout
from pipelinerl.errors import CheckpointError
from pipelinerl.system.storage import Storage
from pipelinerl.weights.digest import WeightDigest
from pipelinerl.weights.parameter_server.retention import Key, named
from pipelinerl.weights.parameter_server.wire import ShardSpec

log = logging.getLogger("pipelinerl")

_BYTES: Final = "weights.bin"
_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSnapshot:
    """One shard of a version as it lies in the store; `digest` is of its bytes, `whole` of the version's."""

    key: Key
    layout: WeightLayout
    shard: ShardSpec
    digest: str
    whole: str


@final
class SnapshotStore:
    """The newest `keep` snapshots below `place`; made by one server, which alone writes there."""

    def __init__(self, place: str, *, keep: int = 2) -> None:
        self.place = place
        self._keep = keep
        self._files = Storage(place)

    def save(self, snapshot: VersionSnapshot, memory: NDArray[Any]) -> None:
        """Write a snapshot out of the whole version's `memory`; durable when this returns. Raises `OSError`."""
        key, layout, shard = snapshot.key, snapshot.layout, snapshot.shard
        self._files.remove(f"{named(key)}/{_MANIFEST}")  # of the same version, should its bytes differ
        manifest = {
            "format": _FORMAT,
            "epoch": key[0],
            "version": key[1],
            "shard": shard.model_dump(),
            "digest": snapshot.digest,
            "whole": snapshot.whole,
            "layout": layout.model_dump(mode="json"),
        }
        self._files.write(f"{named(key)}/{_BYTES}", *(memory[start:end].data for start, end in shard.ranges(layout)))
        self._files.write(f"{named(key)}/{_MANIFEST}", json.dumps(manifest).encode())
        for old in self._keys()[: -self._keep]:
            self._files.remove(named(old))

    def newest(self) -> Iterator[VersionSnapshot]:
        """What can be read back, the newest first; damaged manifests are named in the log and skipped."""
        for key in reversed(self._keys()):
            try:
                manifest = json.loads(self._files.read(f"{named(key)}/{_MANIFEST}"))
                if manifest["format"] != _FORMAT or (manifest["epoch"], manifest["version"]) != key:
                    raise ValueError(f"expected format {_FORMAT} of version {named(key)}")
                layout, shard = manifest["layout"], manifest["shard"]
                yield VersionSnapshot(
                    key=key,
                    layout=WeightLayout.model_validate(layout),
                    shard=ShardSpec.model_validate(shard),
                    digest=str(manifest["digest"]),
                    whole=str(manifest["whole"]),
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                log.error("skipping the snapshot %s in %s, which is not whole: %s", named(key), self.place, error)

    def read(self, snapshot: VersionSnapshot, into: NDArray[Any]) -> None:
        """Fill `into` [num_bytes of the whole version] where the shard's ranges say.

        Raises:
            CheckpointError: the bytes are missing, or are not those that were saved.
        """
        where = f"{self.place}: weights {named(snapshot.key)}"
        digest = WeightDigest()
        try:
            with self._files.open(f"{named(snapshot.key)}/{_BYTES}") as file:
                for at, end in snapshot.shard.ranges(snapshot.layout):
                    while at < end and (count := file.readinto(into[at:end].data)):
                        digest.update(into[at : at + count])
                        at += count
        except OSError as error:
            raise CheckpointError(f"{where} cannot be read: {error}") from None
        if digest.hexdigest() != snapshot.digest:
            raise CheckpointError(f"{where} have changed since they were saved; they are not used")

    def clear(self) -> None:
        """Drop every snapshot."""
        for key in self._keys():
            self._files.remove(named(key))

    def _keys(self) -> list[Key]:
        """Folders with a version's name, oldest first, whole or not."""
        parts = [name.split(".") for name in self._files.names()]
        return sorted((int(p[0]), int(p[1])) for p in parts if len(p) == 2 and p[0].isdecimal() and p[1].isdecimal())
