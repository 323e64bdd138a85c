"""The versions of one parameter server: at most `room` in memory (`VersionTable`), the newest on disk.

    announced ── bytes are written ──▶ sealed (complete) ── dropped, if `collectable` ──▶ its memory is reused

Only sealed versions are served, and a sealed version never changes. An incomplete version is dropped when the next one
is announced. Memory is allocated once and then reused, since writing to new pages costs several times as much. Requests
of an earlier trainer process (a lower epoch) are rejected. All methods must run on one event loop.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from numpy.typing import NDArray

from inference_contract.errors import (
    DigestMismatch,
    InvalidRequest,
    LayoutMismatch,
    NotPrepared,
    Overloaded,
    StaleVersion,
)
from inference_contract.weights import MOST_EPOCH_STEP, WeightLayout
from pipelinerl.errors import CheckpointError
from pipelinerl.plugins.parameter_server.connection import Announcement, Key, ShardSpec, VersionRecord
from pipelinerl.plugins.parameter_server.shared_memory import SharedMemory
from pipelinerl.system.storage import Storage
from pipelinerl.weights.layout import WeightDigest
from pipelinerl.weights.pull import Range

log = logging.getLogger("pipelinerl")

_BYTES: Final = "weights.bin"
_MANIFEST: Final = "manifest.json"
_FORMAT: Final = 2


@dataclass(frozen=True, slots=True)
class Version:
    """A version in a server's memory; `digest` (of its shard) and `whole` are None until it is sealed (complete).

    `segment` has the whole version's size, so that a byte has the same offset on every server. Pages that belong to
    other shards are never written and therefore never allocated.
    """

    key: Key
    layout: WeightLayout
    shard: ShardSpec
    ranges: tuple[Range, ...]
    segment: SharedMemory
    digest: str | None = None
    whole: str | None = None

    def record(self) -> VersionRecord:
        return VersionRecord(
            epoch=self.key[0],
            version=self.key[1],
            layout_id=self.layout.layout_id,
            num_bytes=self.layout.num_bytes,
            shard=self.shard,
            digest=self.digest,
            whole=self.whole,
            segment=self.segment.address,
        )


class VersionTable:
    """The versions that a server holds for the engines, and the version that each engine has confirmed last."""

    def __init__(self, *, room: int) -> None:
        """Create a table of at most `room` versions: 2 or more, as one is served while another is being written."""
        if room < 2:
            raise ValueError(f"room must be at least 2, for a version being served and one being written, got {room}")
        self.room = room
        self.epoch = 0
        self.progress: dict[str, Key | None] = {}
        self._held: dict[Key, Version] = {}
        self._spare: list[SharedMemory] = []
        self._uses: Counter[Key] = Counter()

    def versions(self) -> list[Version]:
        return [self._held[key] for key in sorted(self._held)]

    def newest(self) -> Version | None:
        whole = self._whole()
        return self._held[max(whole)] if whole else None

    def find(self, key: Key) -> Version:
        """Return the version with this key. Raises `NotPrepared` if the server does not hold it."""
        if key not in self._held:
            held = ", ".join(map(named, sorted(self._held))) or "none"
            raise NotPrepared(f"version {named(key)} is not held here; held: {held}", param="version")
        return self._held[key]

    def whole(self, key: Key) -> Version:
        """Return the complete version with this key. Raises `NotPrepared` if it is not held, or not complete yet."""
        version = self.find(key)
        if version.digest is None:
            raise NotPrepared(f"version {named(key)} is not complete yet: its bytes are still being written")
        return version

    def announce(self, announcement: Announcement) -> Version:
        """Allocate memory for a version and return it; unchanged if it is held. Raises StaleVersion after a later epoch
        or complete version, LayoutMismatch, and Overloaded, naming the members that still need every version.
        """
        key = (announcement.epoch, announcement.version)
        self.confirm(announcement.epoch, announcement.progress)
        known = self._held.get(key)
        if known is not None:
            difference = known.layout.difference(announcement.layout)
            if difference is not None:
                raise LayoutMismatch(f"version {named(key)} was announced with another layout: {difference}")
            if known.shard != announcement.shard:
                raise LayoutMismatch(
                    f"version {named(key)} was announced as {known.shard}, now as {announcement.shard}", param="shard"
                )
            return known
        newest = max(self._whole(), default=None)
        if newest is not None and key < newest:
            raise StaleVersion(f"version must come after {named(newest)}, which is complete, got {named(key)}")
        for unfinished in self._held.keys() - self._whole():
            # Drop an unfinished version instead of reusing its memory: its writer may still be writing.
            del self._held[unfinished]
        if len(self._held) >= self.room:
            reasons = holders(self._whole(), self.progress, epoch=self.epoch, in_use=set(self._uses))
            raise Overloaded(f"all {self.room} versions are still needed: {'; '.join(reasons)}")
        layout, shard = announcement.layout, announcement.shard
        ranges = shard.ranges(layout)
        fitting = [segment for segment in self._spare if segment.num_bytes == layout.num_bytes]
        segment = fitting[-1] if fitting else SharedMemory(layout.num_bytes)
        self._spare = fitting[:-1]
        made = Version(key, layout, shard, ranges, segment)
        self._held[key] = made
        return made

    def seal(self, key: Key, digest: str, whole: str) -> Version:
        """Mark a version complete, whose bytes have this `digest`. Raises NotPrepared, DigestMismatch (another)."""
        held = self.find(key)
        if held.digest not in (None, digest):
            raise DigestMismatch(f"version {named(key)} is complete with digest {held.digest}, got {digest}")
        self._held[key] = sealed = replace(held, digest=digest, whole=whole)
        self._collect()
        return sealed

    def confirm(self, epoch: int, progress: Mapping[str, Key | None]) -> None:
        """Record each member's confirmed version, forget other members, and drop versions that none needs. Raises
        StaleVersion after a later epoch, InvalidRequest if `epoch` is implausibly far ahead.
        """
        if epoch < self.epoch:
            raise StaleVersion(
                f"epoch {self.epoch} has taken over from epoch {epoch}: another trainer is running; stop this one. If "
                "none is, this server received a wrong epoch: restart it",
                param="epoch",
                known={"epoch": self.epoch},
            )
        if epoch > self.epoch + MOST_EPOCH_STEP:
            raise InvalidRequest(
                f"epoch must be at most {MOST_EPOCH_STEP} above {self.epoch}, the last one known here, got {epoch}; if "
                "it is correct, restart this server",
                param="epoch",
            )
        self.epoch, self.progress = epoch, dict(progress)
        self._collect()

    @contextmanager
    def using(self, key: Key) -> Iterator[Version]:
        """Yield a version, and do not drop it during the `with` block. Raises `NotPrepared` if it is not held."""
        version = self.find(key)
        self._uses[key] += 1
        try:
            yield version
        finally:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self._collect()

    def _whole(self) -> set[Key]:
        return {key for key, held in self._held.items() if held.digest is not None}

    def _collect(self) -> None:
        for key in collectable(self._whole(), self.progress, epoch=self.epoch, in_use=set(self._uses)):
            self._spare.append(self._held.pop(key).segment)


def collectable(whole: Set[Key], progress: Mapping[str, Key | None], *, epoch: int, in_use: Set[Key]) -> set[Key]:
    """Return those complete versions (`whole`) that can be dropped: not the newest, nor `in_use`; of an earlier epoch,
    or older than every member's confirmed version (`progress`).
    """
    newest = max(whole, default=None)
    return {
        key
        for key in whole
        if key != newest and key not in in_use and (key[0] < epoch or all(_past(key, at) for at in progress.values()))
    }


def holders(whole: Set[Key], progress: Mapping[str, Key | None], *, epoch: int, in_use: Set[Key]) -> list[str]:
    """Explain for an error message why each older version is kept; the arguments are those of `collectable`."""
    newest = max(whole, default=None)
    reasons = []
    for key in sorted(whole - {newest}):
        behind = [f"{name} (at {named(at)})" for name, at in progress.items() if not _past(key, at)]
        if key in in_use:
            reasons.append(f"{named(key)} is being sent or saved")
        elif key[0] >= epoch and behind:
            reasons.append(f"{named(key)} is held for {', '.join(behind)}")
    return reasons


def named(key: Key | None) -> str:
    """Format a version for messages: `1.57`."""
    return "none" if key is None else f"{key[0]}.{key[1]}"


def _past(key: Key, confirmed: Key | None) -> bool:
    return confirmed is not None and confirmed > key


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSnapshot:
    """One shard of a version, as saved. `digest` is that of the shard's bytes, `whole` that of the whole version."""

    key: Key
    layout: WeightLayout
    shard: ShardSpec
    digest: str
    whole: str


class SnapshotStore:
    """Store of the newest `keep` snapshots in the folder `place`. Only one server may write there."""

    def __init__(self, place: str, *, keep: int = 2) -> None:
        self.place = place
        self._keep = keep
        self._files = Storage(place)

    def save(self, snapshot: VersionSnapshot, memory: NDArray[Any]) -> None:
        """Write a snapshot from the whole version's `memory`; it is durable when this returns. Raises `OSError`."""
        key, layout, shard = snapshot.key, snapshot.layout, snapshot.shard
        # Remove the manifest first: an earlier snapshot of the same version may have other bytes.
        self._files.remove(f"{named(key)}/{_MANIFEST}")
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
        """Fill the shard's ranges of `into` [bytes of the version]. Raises CheckpointError for lost or bad bytes."""
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
        for key in self._keys():
            self._files.remove(named(key))

    def _keys(self) -> list[Key]:
        parts = [name.split(".") for name in self._files.names()]
        return sorted((int(p[0]), int(p[1])) for p in parts if len(p) == 2 and p[0].isdecimal() and p[1].isdecimal())
