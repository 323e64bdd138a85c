"""What is said to a parameter server and by it, and where: the routes and records of `parameter_server`.

The route that engines use, `GET /weights/{epoch}/{version}`, belongs to the inference contract; the rest is between a
trainer and its servers.
"""

from __future__ import annotations

from typing import Final

from pydantic import Field

from inference_contract.schemas import WeightLayout
from inference_contract.weights import BaseUrl
from inference_contract.wire import Wire
from pipelinerl.weights.retention import Key
from pipelinerl.weights.segment import SegmentAddress

VERSIONS: Final = "/versions"
VERSION: Final = "/versions/{epoch}/{version}"
SEAL: Final = "/versions/{epoch}/{version}/seal"
COPY: Final = "/versions/{epoch}/{version}/copy"
PROGRESS: Final = "/progress"


class Announcement(Wire):
    """A version is coming; `progress` is what each member has confirmed, and names all that are counted on."""

    epoch: int = Field(ge=0)
    version: int = Field(ge=0)
    layout: WeightLayout
    progress: dict[str, Key | None] = Field(default_factory=dict)


class Seal(Wire):
    """All bytes were written; they have this digest."""

    digest: str


class CopyOrder(Wire):
    """Fetch the bytes of an announced version from another server instead of waiting for the trainer to write them."""

    source: BaseUrl
    digest: str
    timeout_s: float = Field(gt=0, le=3600)


class ProgressReport(Wire):
    """What each member has confirmed; who is not named is not waited for any more."""

    epoch: int = Field(ge=0)
    progress: dict[str, Key | None]


class VersionRecord(Wire):
    """One version on one server: the bytes [start, end) of its layout, all of them while a server is one process.

    `digest` is None until it is whole. `segment` is where a process on the same host can map it.
    """

    epoch: int
    version: int
    layout_id: str
    num_bytes: int
    start: int
    end: int
    digest: str | None
    segment: SegmentAddress | None

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
