"""Wire types of weight updates: the process group, the weight layout, and the phases of an update."""

from __future__ import annotations

import hashlib
import heapq
import json
from bisect import bisect_right
from collections.abc import Collection
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Annotated, Final, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints, model_validator

from inference_contract.wire import Wire

# --- process group -----------------------------------------------------------------------------------------------


#: The most pieces of one update: a piece costs one collective in a broadcast, and memory for a byte range in a pull.
MAX_PIECES: Final = 2**20

#: Limits on epochs, versions and generations, and the most by which one request may raise each of them. An engine
#: never accepts a lower number again, so without limits one wrong request could lock out all trainers. Epochs count a
#: run's trainer processes, versions its steps. Generations encode (epoch, set of engines, attempt), 2⁴⁰ per epoch.
MOST_EPOCH: Final = 2**21
MOST_VERSION: Final = 2**40
MOST_GENERATION: Final = 2**62
MOST_EPOCH_STEP: Final = 2**16
MOST_VERSION_STEP: Final = 2**24
MOST_GENERATION_STEP: Final = 2**56

#: Text short enough to repeat in error messages.
ShortText = Annotated[str, StringConstraints(max_length=128)]


class Backend(StrEnum):
    """Collective library: gloo between CPUs, NCCL between NVIDIA GPUs."""

    GLOO = "gloo"
    NCCL = "nccl"


class Connections(StrEnum):
    """Connection patterns of a gloo group; without a pattern, gloo connects all pairs of ranks."""

    TREE = "tree"
    """Connect only the ranks that exchange data in a broadcast from rank 0. gloo connects lazily: rank 0 broadcasts one
    byte to open the connections, and a rank has joined when it has received that byte."""


class InitProcessGroupRequest(Wire):
    """Join the process group `group` as `rank` of `world_size`; rank 0 is the trainer.

    `generation` numbers the groups in order. Joining the same generation again is a no-op. A group of a higher
    generation replaces the current group once the new group has formed. A generation more than `MOST_GENERATION_STEP`
    higher is rejected. A lower one is rejected with `stale_generation`, which reports the generation joined. A failed
    join changes nothing, but uses up its generation.

    Attributes:
        rendezvous_host: host of the trainer's TCP store. If a rank is missing, the trainer closes the store, and all
            waiting joins fail immediately.
        rendezvous_port: port of the store, which is open before any engine is asked to join.
        rank: this engine's rank, 1 or above.
        connections: connection pattern of a gloo group; None lets gloo connect all pairs.
        timeout_s: longest wait for the other ranks.
    """

    group: Annotated[str, StringConstraints(min_length=1, max_length=128)]
    backend: Backend
    rendezvous_host: Annotated[str, StringConstraints(max_length=256)]
    rendezvous_port: int = Field(ge=1, le=65535)
    rank: int = Field(ge=1)
    world_size: int = Field(ge=2)
    generation: int = Field(ge=0, lt=MOST_GENERATION)
    connections: Connections | None = None
    timeout_s: float = Field(default=60.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _rank_in_world(self) -> Self:
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be below world_size {self.world_size}, got {self.rank}")
        return self


class ProcessGroupStatus(Wire):
    """The process group that is currently joined."""

    group: str
    generation: int
    rank: int
    world_size: int


# --- weights -----------------------------------------------------------------------------------------------------


class DType(StrEnum):
    """Element types of a weight update."""

    FLOAT64 = "float64"
    FLOAT32 = "float32"
    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"

    @property
    def itemsize(self) -> int:
        return _ITEM_BYTES[self]


_ITEM_BYTES = {DType.FLOAT64: 8, DType.FLOAT32: 4, DType.FLOAT16: 2, DType.BFLOAT16: 2, DType.INT8: 1}


class ParameterSpec(Wire):
    """One parameter, by its Hugging Face name."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=512)]
    shape: tuple[Annotated[int, Field(ge=0, lt=2**63)], ...] = Field(max_length=16)
    dtype: DType

    @property
    def num_bytes(self) -> int:
        """The parameter's size on the wire, in bytes."""
        return prod(self.shape) * self.dtype.itemsize


class WeightLayout(Wire):
    """All parameters of a model, in the order of their bytes on the wire: back to back, without padding."""

    parameters: tuple[ParameterSpec, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_unique(self) -> Self:
        names = [parameter.name for parameter in self.parameters]
        if len(set(names)) != len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise ValueError(f"parameter names must be unique, got {twice!r} twice")
        return self

    @cached_property
    def layout_id(self) -> str:
        """Digest of names, order, shapes and dtypes; engines that know the layout accept it in place of the layout."""
        rows = [[p.name, list(p.shape), p.dtype.value] for p in self.parameters]
        return hashlib.sha256(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()[:32]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The end offset of each parameter's bytes."""
        return tuple(accumulate(parameter.num_bytes for parameter in self.parameters))

    @property
    def num_bytes(self) -> int:
        """The whole model's size on the wire, in bytes."""
        return self.ends[-1]

    def buckets(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Return byte ranges [start, end) of whole parameters: at most `bucket_bytes` long, or one larger parameter."""
        ends, ranges, start = self.ends, [], 0
        while start < self.num_bytes:
            following = bisect_right(ends, start)  # index of the next parameter that is not empty
            last = max(bisect_right(ends, start + bucket_bytes) - 1, following)
            ranges.append((start, ends[last]))
            start = ends[last]
        return ranges

    def pieces(self, bucket_bytes: int) -> list[tuple[int, int]]:
        """Return the byte range [start, end) of each collective of a broadcast: the buckets, cut to `bucket_bytes`."""
        return [piece for start, end in self.buckets(bucket_bytes) for piece in cut(start, end, bucket_bytes)]

    def agreement(self, bucket_bytes: int) -> str:
        """Return a text that determines all `pieces`; sender and receivers compare it before a broadcast."""
        return f"{self.layout_id} {bucket_bytes}"

    def shards(self, count: int, bucket_bytes: int) -> list[list[tuple[int, int]]]:
        """Return the byte ranges [start, end) of each of `count` servers, in order; together they cover the model.

        Buckets are assigned largest first (ties: the earlier one) to the shard with the fewest bytes so far (ties: the
        first), and adjacent ranges are merged. Buckets hold whole parameters, so no shard cuts a parameter. Shards are
        about equal. Neighbouring buckets are mostly on different servers, so a sender that walks the layout keeps all
        of them busy.
        """
        owned: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        least = [(0, number) for number in range(count)]
        for start, end in sorted(self.buckets(bucket_bytes), key=lambda bucket: bucket[0] - bucket[1]):
            filled, number = least[0]
            heapq.heapreplace(least, (filled + end - start, number))
            owned[number].append((start, end))
        return [_joined(sorted(ranges)) for ranges in owned]

    def difference(self, other: WeightLayout, *, converted: Collection[DType] = ()) -> str | None:
        """Describe the first difference from `other`, except of dtypes in `converted`; None if there is none."""
        if self.layout_id == other.layout_id:
            return None
        ours = {p.name: p for p in self.parameters}
        theirs = {p.name: p for p in other.parameters}
        for name in ours.keys() - theirs.keys():
            return f"parameter {name!r} is missing"
        for name in theirs.keys() - ours.keys():
            return f"parameter {name!r} is not part of this model"
        for position, (expected, got) in enumerate(zip(self.parameters, other.parameters, strict=True)):
            if expected.name != got.name:
                return f"parameter {position} must be {expected.name!r}, got {got.name!r}: the order differs"
            if expected.shape != got.shape:
                return f"parameter {got.name!r} must have shape {list(expected.shape)}, got {list(got.shape)}"
            if got.dtype != expected.dtype and got.dtype not in converted:
                taken = " or ".join(dict.fromkeys([expected.dtype.value, *(dtype.value for dtype in converted)]))
                return f"parameter {got.name!r} must have dtype {taken}, got {got.dtype.value}"
        return None


def cut(start: int, end: int, most: int) -> list[tuple[int, int]]:
    """Split [start, end) into ranges of length `most`; the last may be shorter."""
    return [(at, min(at + most, end)) for at in range(start, end, most)]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        first = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((first, end))
    return joined


class UpdatePhase(StrEnum):
    """Phases of a weight update; a broadcast starts only after all engines have accepted PREPARE."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"


def can_be_looked_up(url: str) -> str:
    """Return the URL unchanged; raise ValueError if its port is invalid or no resolver would accept its host name."""
    try:
        address = urlsplit(url)
        (address.hostname or "").encode("idna")
        is_valid = bool(address.hostname) and address.port != 0
    except ValueError:
        is_valid = False
    if not is_valid:
        raise ValueError(
            "must name a host whose labels have 1 to 63 characters each, and a port from 1 to 65535 if any, such as "
            "http://gpu-1.lab:8001"
        )
    return url


#: A server's base URL: no path, query or credentials, and a host name that a resolver accepts.
BaseUrl = Annotated[
    str, StringConstraints(pattern=r"^https?://[^/?#@\s]+$", max_length=256), AfterValidator(can_be_looked_up)
]


#: Servers that hold the same bytes, in order of preference.
Sources = Annotated[tuple[BaseUrl, ...], Field(min_length=1, max_length=256)]


class Transport(StrEnum):
    """Transport of the bytes: pushed through the process group, or pulled from a parameter server."""

    BROADCAST = "broadcast"
    PULL = "pull"


class OnUpdate(StrEnum):
    """Treatment of running sequences when new weights are committed."""

    CONTINUE = "continue"
    """Keep the KV cache and continue (PipelineRL); version spans record which version sampled each token."""
    RECOMPUTE_KV = "recompute_kv"
    """Recompute the cache of every running sequence with the new weights (LlamaRL), then continue."""
    ABORT = "abort"
    """End every running sequence with finish_reason `abort`; the actor resubmits (RLAX: one version per rollout)."""
    DRAIN = "drain"
    """Admit no new sequences and let the running ones finish with the old weights first."""


class WeightUpdateRequest(Wire):
    """One phase of the update to weights (`epoch`, `version`).

    `prepare` carries the manifest (`layout`, or the `layout_id` of one sent before) and arms the receiver; the
    broadcast may start once every engine has answered. `commit` carries the digest of the bytes sent and is answered
    when the new weights serve. `abort` drops staged weights; if their broadcast has not finished, rank 0 leaves the
    group, which ends the receive, and the next update needs a higher generation.

    Broadcast: rank 0 sends one collective of uint8 per range of `WeightLayout.pieces(bucket_bytes)`, in order. gloo
    kills a process that receives a longer piece than it expects. `pieces_key` prevents this: just before it sends,
    rank 0 writes `WeightLayout.agreement(bucket_bytes)` under this key of the rendezvous store, below
    `<group>/<generation>`. An engine enters a collective only after it has read a value equal to its own.

    Pull: after it answers `prepare`, the engine fetches the bytes from `routes.WEIGHTS` below a source, whole or in
    ranges (`Range: bytes=a-b`, answered with 206), with the bearer token that the engine itself requires. If a source
    fails, the engine tries the next. `prepare` must contain the digest and needs no group; a `prepare` of a later
    version drops uncommitted bytes of an earlier one. After an `abort`, the next `prepare` may follow at once.

    Attributes:
        version: version of the new weights; it only rises, by at most `MOST_VERSION_STEP` above the engine's.
        epoch: number of the trainer process; it only rises, by at most `MOST_EPOCH_STEP` above the engine's.
        group: process group of the broadcast; required in PREPARE of a broadcast, as is its `generation`.
        pieces_key: key of the rendezvous store for the agreement on pieces, see above.
        sources: base URLs of servers that hold the same bytes, in order of preference.
        shards: used in place of `sources` if no server holds all bytes. The servers of shard i hold the ranges
            `WeightLayout.shards(n, bucket_bytes)[i]`, which are requested by their offsets in the whole model.
        layout: the manifest; PREPARE needs either `layout` or `layout_id`.
        bucket_bytes: size of the buckets that `WeightLayout` forms.
        digest: XXH3-128 of all bytes in layout order, in hexadecimal; required in COMMIT, and in PREPARE of a pull.
        timeout_s: longest wait of the phase for peers. In PREPARE it bounds a whole pull, or the gap between two
            pieces of a broadcast.
    """

    phase: UpdatePhase
    version: int = Field(ge=0, lt=MOST_VERSION)
    epoch: int = Field(default=0, ge=0, lt=MOST_EPOCH)
    transport: Transport = Transport.BROADCAST
    group: ShortText | None = None
    generation: int | None = None
    pieces_key: ShortText | None = None
    sources: Sources | None = None
    shards: tuple[Sources, ...] | None = Field(default=None, min_length=1, max_length=256)
    layout: WeightLayout | None = None
    layout_id: ShortText | None = None
    bucket_bytes: int = Field(default=16 * 2**20, ge=1)
    on_update: OnUpdate = OnUpdate.CONTINUE
    digest: ShortText | None = None
    timeout_s: float = Field(default=120.0, gt=0, le=3600)

    @model_validator(mode="after")
    def _fields_of_phase(self) -> Self:
        if self.phase is UpdatePhase.PREPARE:
            if (self.layout is None) == (self.layout_id is None):
                raise ValueError("prepare needs exactly one of layout and layout_id")
            if self.transport is Transport.BROADCAST and (self.group is None or self.generation is None):
                raise ValueError("prepare with transport broadcast needs group and generation")
            if self.transport is Transport.PULL and self.digest is None:
                raise ValueError("prepare with transport pull needs digest")
            if self.transport is Transport.PULL and (self.sources is None) == (self.shards is None):
                raise ValueError("prepare with transport pull needs exactly one of sources and shards")
        if self.phase is UpdatePhase.COMMIT and self.digest is None:
            raise ValueError("commit needs digest")
        return self


class UpdateStatus(StrEnum):
    """Outcome of one phase of a weight update."""

    PREPARED = "prepared"
    COMMITTED = "committed"
    ABORTED = "aborted"
    ALREADY_SERVING = "already_serving"


class WeightUpdateResponse(Wire):
    """The weights that the engine serves after the phase, and the cost of the update.

    Attributes:
        digest: digest of the served weights' bytes, if they came from an update.
        pause_s: time during which no sequence could decode.
        receive_s: time to receive the bytes, during which decoding continues.
        num_bytes: size of the weights after a COMMIT, else 0.
    """

    status: UpdateStatus
    version: int
    epoch: int
    digest: str | None = None
    pause_s: float = 0.0
    receive_s: float = 0.0
    num_bytes: int = 0
