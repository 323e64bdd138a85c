"""Routes and messages of the parameter server's HTTP interface.

The inference contract owns the route that engines use, `GET /weights/{epoch}/{version}`; the rest is between a trainer
and its servers.
"""

from __future__ import annotations

from typing import Final, Self

from pydantic import Field, model_validator

from inference_contract.weights import MOST_EPOCH, MOST_VERSION, BaseUrl, WeightLayout
from inference_contract.wire import Wire
from pipelinerl.weights.parameter_server.retention import Key
from pipelinerl.weights.parameter_server.shared_memory import SharedMemoryAddress
from pipelinerl.weights.pull import Range

VERSIONS: Final = "/versions"
VERSION: Final = "/versions/{epoch}/{version}"
SEAL: Final = "/versions/{epoch}/{version}/seal"
COPY: Final = "/versions/{epoch}/{version}/copy"
PROGRESS: Final = "/progress"


class ShardSpec(Wire):
    """The part of a version that a server holds: shard `number` of `count`, as cut by `WeightLayout.shards`."""

    number: int = Field(default=0, ge=0)
    count: int = Field(default=1, ge=1, le=256)
    bucket_bytes: int = Field(default=16 * 2**20, ge=1)

    @model_validator(mode="after")
    def _number_in_count(self) -> Self:
        if self.number >= self.count:
            raise ValueError(f"number must be below count {self.count}, got {self.number}")
        return self

    def ranges(self, layout: WeightLayout) -> tuple[Range, ...]:
        """Return the byte ranges [start, end) of the version that this shard holds, in order."""
        return tuple(layout.shards(self.count, self.bucket_bytes)[self.number])

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count} (buckets of {self.bucket_bytes} bytes)"


class Announcement(Wire):
    """Announcement of a coming version. `progress` lists all members, each with the version it has confirmed."""

    epoch: int = Field(ge=0, lt=MOST_EPOCH)
    version: int = Field(ge=0, lt=MOST_VERSION)
    layout: WeightLayout
    shard: ShardSpec = ShardSpec()
    progress: dict[str, Key | None] = Field(default_factory=dict)


class Seal(Wire):
    """Request to seal a shard whose bytes have digest `digest`; `whole` is the digest of the whole version."""

    digest: str
    whole: str


class CopyOrder(Wire):
    """Request to fetch the bytes of an announced version from another server, in place of a write by the trainer."""

    source: BaseUrl
    digest: str
    whole: str
    timeout_s: float = Field(gt=0, le=3600)


class ProgressReport(Wire):
    """The version that each member has confirmed; versions are no longer held for members that are not listed."""

    epoch: int = Field(ge=0, lt=MOST_EPOCH)
    progress: dict[str, Key | None]


class VersionRecord(Wire):
    """One version on one server: `shard` of the `num_bytes` of its layout.

    `digest` covers the shard's bytes, `whole` the version's; both are None until the version is sealed. A process on
    the same host can map the version at `segment`; only the shard's bytes in it are valid.
    """

    epoch: int
    version: int
    layout_id: str
    num_bytes: int
    shard: ShardSpec
    digest: str | None
    whole: str | None
    segment: SharedMemoryAddress | None

    @property
    def key(self) -> Key:
        """Key of the version: (epoch, version)."""
        return self.epoch, self.version


class ServerState(Wire):
    """The versions that a server holds, oldest first, and the members it holds them for."""

    epoch: int
    room: int
    versions: tuple[VersionRecord, ...]
    progress: dict[str, Key | None]
    saved: Key | None
