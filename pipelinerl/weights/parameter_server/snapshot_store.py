"""`SnapshotStore`: the persistent copy of a parameter server's newest version (RLAX §3.2: double storage).

    <place>/1.57/weights.bin        the shard's bytes, its ranges back to back
    <place>/1.57/manifest.json      layout, shard, digests; written last: without it there is no snapshot

`place` is a directory, or any URL that fsspec knows (`s3://…`, `gs://…`). Bytes are returned only if they have the
digest with which they were saved. Every call blocks, so call it from a thread.
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
    """One shard of a version in the store. `digest` covers the shard's bytes, `whole` the version's."""

    key: Key
    layout: WeightLayout
    shard: ShardSpec
    digest: str
    whole: str


@final
class SnapshotStore:
    """The newest `keep` snapshots below `place`. Only one server may write there."""

    def __init__(self, place: str, *, keep: int = 2) -> None:
        self.place = place
        self._keep = keep
        self._files = Storage(place)

    def save(self, snapshot: VersionSnapshot, memory: NDArray[Any]) -> None:
        """Write a snapshot from the whole version's `memory`; it is durable when this returns. Raises `OSError`."""
        key, layout, shard = snapshot.key, snapshot.layout, snapshot.shard
        self._files.remove(f"{named(key)}/{_MANIFEST}")  # an earlier snapshot of the same version may have other bytes
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
        """Yield the readable snapshots, newest first; log damaged manifests and skip them."""
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
                log.error("skipping the snapshot %s in %s, which is incomplete: %s", named(key), self.place, error)

    def read(self, snapshot: VersionSnapshot, into: NDArray[Any]) -> None:
        """Fill the shard's ranges of `into` [num_bytes of the whole version].

        Raises:
            CheckpointError: the bytes are missing, or differ from those that were saved.
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
        """Delete every snapshot."""
        for key in self._keys():
            self._files.remove(named(key))

    def _keys(self) -> list[Key]:
        """Return the versions that have a folder, oldest first, even if the snapshot is incomplete."""
        parts = [name.split(".") for name in self._files.names()]
        return sorted((int(p[0]), int(p[1])) for p in parts if len(p) == 2 and p[0].isdecimal() and p[1].isdecimal())
