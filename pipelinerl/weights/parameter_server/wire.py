"""What is said to a parameter server and by it, and where: the routes and records of `parameter_server`.

The route that engines use, `GET /weights/{epoch}/{version}`, belongs to the inference contract; the rest is between a
trainer and its servers.
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
    """What a server holds of a version: shard `number` of `count`, as `WeightLayout.shards` deals them out."""

    number: int = Field(default=0, ge=0)
    count: int = Field(default=1, ge=1, le=256)
    bucket_bytes: int = Field(default=16 * 2**20, ge=1)

    @model_validator(mode="after")
    def _number_in_count(self) -> Self:
        if self.number >= self.count:
            raise ValueError(f"number must be below count {self.count}, got {self.number}")
        return self

    def ranges(self, layout: WeightLayout) -> tuple[Range, ...]:
        """The bytes [start, end) of the version that it holds, in order."""
        return tuple(layout.shards(self.count, self.bucket_bytes)[self.number])

    def __str__(self) -> str:
        return f"shard {self.number} of {self.count} (buckets of {self.bucket_bytes} bytes)"


class Announcement(Wire):
    """A version is coming; `progress` is what each member has confirmed, and names all that are counted on."""

    epoch: int = Field(ge=0, lt=MOST_EPOCH)
    version: int = Field(ge=0, lt=MOST_VERSION)
    layout: WeightLayout
    shard: ShardSpec = ShardSpec()
    progress: dict[str, Key | None] = Field(default_factory=dict)


class Seal(Wire):
    """All bytes of the shard were written; they have this digest, and those of the whole version the digest `whole`."""

    digest: str
    whole: str


class CopyOrder(Wire):
    """Fetch the bytes of an announced version from another server instead of waiting for the trainer to write them."""

    source: BaseUrl
    digest: str
    whole: str
    timeout_s: float = Field(gt=0, le=3600)


class ProgressReport(Wire):
    """What each member has confirmed; who is not named is not waited for any more."""

    epoch: int = Field(ge=0, lt=MOST_EPOCH)
    progress: dict[str, Key | None]


class VersionRecord(Wire):
    """One version on one server: `shard` of the `num_bytes` of its layout.

    `digest` is that of the shard's bytes, `whole` that of all; None until they are there. `segment` is where a process
    on the same host can map the version, of which only the shard's bytes mean anything.
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
        """(epoch, version)."""
        return self.epoch, self.version


class ServerState(Wire):
    """What a server holds, oldest first, and whom it counts on."""

    epoch: int
    room: int
    versions: tuple[VersionRecord, ...]
    progress: dict[str, Key | None]
    saved: Key | None
