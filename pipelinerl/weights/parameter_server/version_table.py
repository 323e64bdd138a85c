"""`VersionTable`: the versions that one parameter server holds in memory, at most `room` of them.

    announced ── bytes are written ──▶ sealed (whole) ── collected, by `retention` ──▶ its memory takes another version

Promises: only a sealed version is given out; a version that is whole never changes; one that was not finished goes when
the next is announced; memory is allocated once and then reused, for first touch costs several times a rewrite; a
trainer of an earlier epoch is refused. Every method runs on one event loop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from inference_contract.errors import (
    DigestMismatch,
    InvalidRequest,
    LayoutMismatch,
    NotPrepared,
    Overloaded,
    StaleVersion,
)
from inference_contract.weights import MOST_EPOCH_STEP, WeightLayout
from pipelinerl.weights.parameter_server.retention import Key, collectable, holders, named
from pipelinerl.weights.parameter_server.shared_memory import SharedMemory
from pipelinerl.weights.parameter_server.wire import Announcement, ShardSpec, VersionRecord
from pipelinerl.weights.pull import Range


@dataclass(slots=True)
class _Held:
    layout: WeightLayout
    shard: ShardSpec
    ranges: tuple[Range, ...]
    segment: SharedMemory
    digest: str | None = None
    whole: str | None = None


@dataclass(frozen=True, slots=True)
class Version:
    """A version as it is lent out: its key, layout, shard and memory; both digests are None until it is sealed.

    `segment` has the whole version's size, so that a byte has one place everywhere; memory that nobody writes to, for
    it belongs to another shard, is never allocated.
    """

    key: Key
    layout: WeightLayout
    shard: ShardSpec
    ranges: tuple[Range, ...]
    segment: SharedMemory
    digest: str | None
    whole: str | None

    def record(self) -> VersionRecord:
        """The version as it goes over the wire."""
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


@final
class VersionTable:
    """One server's versions, and the progress of the members that are counted on."""

    def __init__(self, *, room: int) -> None:
        """`room` is how many versions fit: one that is complete and one that is coming, at least."""
        if room < 2:
            raise ValueError(f"room must be at least 2, for a version that serves and one that comes, got {room}")
        self.room = room
        self.epoch = 0
        self.progress: dict[str, Key | None] = {}
        self._held: dict[Key, _Held] = {}
        self._spare: list[SharedMemory] = []
        self._uses: Counter[Key] = Counter()

    def versions(self) -> list[Version]:
        """All that are held, oldest first."""
        return [self._lent(key) for key in sorted(self._held)]

    def newest(self) -> Version | None:
        """The newest that is whole."""
        key = max(self._whole(), default=None)
        return None if key is None else self._lent(key)

    def find(self, key: Key) -> Version:
        """Raises `NotPrepared` when it is not held."""
        if key not in self._held:
            held = ", ".join(map(named, sorted(self._held))) or "none"
            raise NotPrepared(f"version {named(key)} is not held here; held: {held}", param="version")
        return self._lent(key)

    def whole(self, key: Key) -> Version:
        """Raises `NotPrepared` when it is not held, or not complete yet."""
        version = self.find(key)
        if version.digest is None:
            raise NotPrepared(f"version {named(key)} is not complete yet: its bytes are still being written")
        return version

    def announce(self, announcement: Announcement) -> Version:
        """Make room for a version; one that is held already is returned as it is.

        Raises:
            StaleVersion: a later epoch has begun, or a later version of this one is whole.
            LayoutMismatch: the same version was announced with another layout.
            Overloaded: every version that is held is still needed; the message names by whom.
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
            return self._lent(key)
        newest = max(self._whole(), default=None)
        if newest is not None and key < newest:
            raise StaleVersion(f"version must come after {named(newest)}, which is complete, got {named(key)}")
        for unfinished in self._held.keys() - self._whole():
            # Not to be reused: whoever began to write it may still do so.
            del self._held[unfinished]
        if len(self._held) >= self.room:
            reasons = holders(self._whole(), self.progress, epoch=self.epoch, in_use=set(self._uses))
            raise Overloaded(f"all {self.room} versions are needed still: {'; '.join(reasons)}")
        layout, shard = announcement.layout, announcement.shard
        self._held[key] = _Held(layout, shard, shard.ranges(layout), self._segment(layout.num_bytes))
        return self._lent(key)

    def seal(self, key: Key, digest: str, whole: str) -> Version:
        """The version is given out from now on; `digest` was compared with its bytes.

        `whole` is kept for those who ask: nobody here can know whether it is true, unless they hold the only shard.

        Raises:
            NotPrepared: it is not held.
            DigestMismatch: it is whole already, with another digest.
        """
        self.find(key)
        held = self._held[key]
        if held.digest not in (None, digest):
            raise DigestMismatch(f"version {named(key)} is complete with digest {held.digest}, got {digest}")
        held.digest, held.whole = digest, whole
        self._collect()
        return self._lent(key)

    def confirm(self, epoch: int, progress: Mapping[str, Key | None]) -> None:
        """Replace what is known of the members' progress, and forget what nobody needs.

        Raises:
            StaleVersion: a later epoch has begun.
            InvalidRequest: no trainer is at that epoch, seen from the last one.
        """
        if epoch < self.epoch:
            raise StaleVersion(
                f"epoch {self.epoch} has taken over from epoch {epoch}: another trainer is running; stop this one. If "
                "none is, this server was told wrong: start it again",
                param="epoch",
                known={"epoch": self.epoch},
            )
        if epoch > self.epoch + MOST_EPOCH_STEP:
            raise InvalidRequest(
                f"epoch must be at most {MOST_EPOCH_STEP} above {self.epoch}, the last one known here, got {epoch}; if "
                "it is right, start this server again",
                param="epoch",
            )
        self.epoch, self.progress = epoch, dict(progress)
        self._collect()

    @contextmanager
    def using(self, key: Key) -> Iterator[Version]:
        """The version, which is not collected while it is used. Raises `NotPrepared` when it is not held."""
        version = self.find(key)
        self._uses[key] += 1
        try:
            yield version
        finally:
            self._uses[key] -= 1
            if not self._uses[key]:
                del self._uses[key]
                self._collect()

    def _lent(self, key: Key) -> Version:
        held = self._held[key]
        return Version(key, held.layout, held.shard, held.ranges, held.segment, held.digest, held.whole)

    def _whole(self) -> set[Key]:
        return {key for key, held in self._held.items() if held.digest is not None}

    def _collect(self) -> None:
        for key in collectable(self._whole(), self.progress, epoch=self.epoch, in_use=set(self._uses)):
            self._spare.append(self._held.pop(key).segment)

    def _segment(self, num_bytes: int) -> SharedMemory:
        fitting = [segment for segment in self._spare if segment.num_bytes == num_bytes]
        segment = fitting[-1] if fitting else SharedMemory(num_bytes)
        self._spare = fitting[:-1]
        return segment
